"""What each rank of test_hosts.py runs: a Transfer from the first host's ranks to replicas on all others."""

import datetime
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_overlay
from torch_overlay.testing.hosts import Hosts, sent_bytes


def main(job, folder, rank, size, timeout, rows=512, budget=256 << 20):
    at = f"tcp://{Hosts.address(0)}:29650"
    dist.init_process_group("gloo", at, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    trains, mesh = rank < 2, DeviceMesh("cpu", [0, 1])
    whole = {f"w{number}": torch.full((rows, 1024), float(number)) + torch.arange(1024) for number in range(4)}  # 8 MB
    source = None
    if trains:
        source = {n: distribute_tensor(each, mesh, [Shard(0)], src_data_rank=None) for n, each in whole.items()}
    target = None if trains else {name: torch.zeros_like(each) for name, each in whole.items()}
    dist.barrier()  # on a busy machine ranks start many seconds apart
    sync = torch_overlay.Transfer(source, target, timeout=timeout, budget=budget)
    sync.run()

    def is_right():
        return trains or all(torch.equal(target[name], each) for name, each in whole.items())

    said = {"size": sum(each.nbytes for each in whole.values()), "way": sync._state.agreement.why, "error": None}
    said["out"] = torch_overlay.explain(sync).links()[0]
    for _ in range(2):  # the second time nothing else is sent meanwhile
        dist.barrier()
        sent = sent_bytes()
        sync.run()
        dist.barrier()
        said["sent"] = sent_bytes() - sent
    said["right"] = is_right()
    (folder / f"{rank}.ready").touch()
    while job == "go" and not (folder / "go").exists():
        time.sleep(0.05)
    begun = time.time()
    try:
        for number in range(10_000 if job == "cut" else 2):
            for each in target.values() if target else ():
                each.zero_()
            sync.run(version=number)
            said["right"] = said["right"] and is_right()
    except Exception as error:
        said |= {"error": f"{type(error).__name__}: {error}", "gone": [*getattr(error, "gone", ())], "at": time.time()}
    said["took"] = time.time() - begun
    begun = time.time()
    sync.close()
    said["close"] = time.time() - begun
    (folder / f"{rank}.json").write_text(json.dumps(said))
    os._exit(0)  # at once, with the store on rank 0


if __name__ == "__main__":
    job, folder, rank, size, timeout, *more = sys.argv[1:]
    main(job, Path(folder), int(rank), int(size), float(timeout), *map(int, more))
