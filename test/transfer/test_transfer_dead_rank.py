"""A rank that is really killed in the middle of a run: the others are told which one, in time, and what was written."""

import os
import signal
import time
from datetime import timedelta

import pytest

import forks

RANKS, DEAD, TIMEOUT = 4, 2, 6


def one_rank(rank, folder, answers):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import torch_overlay
    from torch_overlay.transfers.exchanges import Exchanges

    torch_overlay.enable()
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT))
    mesh = init_device_mesh("cpu", (RANKS,))
    source, target = [
        [distribute_tensor(value, mesh, placements, src_data_rank=None)]
        for value, placements in ((torch.ones(1 << 14), [Shard(0)]), (torch.zeros(1 << 14), [Replicate()]))
    ]
    transfer = torch_overlay.Transfer(source, target, budget=1 << 15)
    assert transfer.exchanges > 3
    start = Exchanges._start

    def dies(self, number, *given):
        if rank == DEAD and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(self, number, *given)

    Exchanges._start = dies
    begun = time.monotonic()
    try:
        transfer.run()
    except RuntimeError as error:
        answers.put((rank, time.monotonic() - begun, str(error)))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal")
def test_the_living_name_the_dead(tmp_path):
    context = forks.context()
    answers = context.Queue()
    processes = [context.Process(target=one_rank, args=(r, str(tmp_path), answers), daemon=True) for r in range(RANKS)]
    for process in processes:
        process.start()
    heard = [answers.get(timeout=60) for _ in range(RANKS - 1)]
    for process in processes:
        process.join(30)
    assert processes[DEAD].exitcode == -signal.SIGKILL
    assert sorted(rank for rank, _, _ in heard) == [rank for rank in range(RANKS) if rank != DEAD]
    for _, seconds, said in heard:
        assert seconds < TIMEOUT + 5 + 2
        assert "some targets are new and others not" in said and f"no answer any more from rank {DEAD}" in said
