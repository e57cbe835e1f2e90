"""What the processes of test_fleet_hosts.py run: two trainers on the first host, and servers on the others."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_overlay
from torch_overlay.testing.hosts import Hosts

AT, KEY, TIMEOUT, SHAPE = f"tcp://{Hosts.address(0)}:29660", "key", 4.0, (512, 1024)
SERVERS = 4


def values(version, mode):
    """8 MB; with `changes` one row in seven changes with each version, and a checkpoint stays as it is."""
    version = 1 if mode == "checkpoint" else version
    row = torch.arange(SHAPE[0])
    changed = version - (version - row) % 7 if mode == "changes" else torch.full_like(row, version)
    return {f"w{n}": (changed[:, None] + n + torch.zeros(SHAPE)).float() for n in range(4)}


def train(folder, mode, rank):
    at = f"tcp://{Hosts.address(0)}:29650"
    dist.init_process_group("gloo", at, rank=rank, world_size=2)
    mesh, runs, version = init_device_mesh("cpu", (2,)), [], 0
    source = {n: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for n, t in values(0, mode).items()}
    given = torch_overlay.checkpoint(folder / "checkpoint") if mode == "checkpoint" else source
    with torch_overlay.meet(AT, rank=rank, world_size=2, key=KEY, timeout=TIMEOUT, open=True) as place:
        sync = torch_overlay.Transfer(given, None, group=place, changes=mode == "changes")
        while True:
            ends = torch.tensor([(folder / "stop").exists()])
            dist.broadcast(ends, 0)
            if ends:
                break
            version += 1
            for name, tensor in values(version, mode).items():
                source[name].to_local().copy_(tensor.chunk(2)[rank])
            begun = time.monotonic()
            work = sync.run(version=version, async_op=mode == "background")
            if work is not None:
                work.wait()
            took = time.monotonic() - begun
            there = [unit.name for unit in place.fleet.units]
            if len(there) == SERVERS:
                (folder / "all").touch()
            gone = [each.name for each in sync.gone]
            why = sync._state.agreement.why
            runs.append({"took": took, "joined": sync.joined, "gone": gone, "there": there, "way": why})
            time.sleep(0.2)
        sync.close()
    (folder / f"trainer {rank}.json").write_text(json.dumps(runs))


def serve(folder, mode, name):
    heard = []
    while not (folder / "stop").exists():
        target = {n: torch.zeros(SHAPE) for n in values(0, mode)}
        try:
            with torch_overlay.join(AT, name=name, key=KEY, timeout=30) as place:
                sync = torch_overlay.Transfer(None, target, group=place, changes=mode == "changes")
                while True:
                    sync.run()
                    wanted = values(sync.version, mode)
                    heard.append([sync.version, all(torch.equal(target[n], each) for n, each in wanted.items())])
        except RuntimeError as error:
            heard.append([None, f"{type(error).__name__}: {error}"])
            time.sleep(0.2)
    (folder / f"{name}.json").write_text(json.dumps(heard))


if __name__ == "__main__":
    folder, mode, who = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    if who.isdigit():
        train(folder, mode, int(who))
    else:
        serve(folder, mode, who)
