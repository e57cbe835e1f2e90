"""A rank that is really killed in the middle of a run: the others are told which one, in time, and what was written."""

import os
import signal
import socket
import time
from datetime import timedelta

import pytest

import forks

RANKS, DEAD, TIMEOUT = 4, 2, 6


def one_rank(rank, folder, port, answers):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import torch_overlay
    from torch_overlay.transfers.exchanges import Exchanges

    torch_overlay.enable()
    size, world = (RANKS, 0) if port is None else (RANKS // 2, rank // 2)
    store = dist.FileStore(f"{folder}/store {world}", size)
    dist.init_process_group("gloo", store=store, rank=rank % size, world_size=size, timeout=timedelta(seconds=TIMEOUT))
    mesh = init_device_mesh("cpu", (size,))
    source, target = [
        [distribute_tensor(value, mesh, placements, src_data_rank=None)]
        for value, placements in ((torch.ones(1 << 14), [Shard(0)]), (torch.zeros(1 << 14), [Replicate()]))
    ]
    place = None
    if port is not None:
        source, target = (source, None) if world == 0 else (None, target)
        place = torch_overlay.meet(f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS, timeout=TIMEOUT)
    transfer = torch_overlay.Transfer(source, target, budget=1 << 15, group=place)
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
        if place is not None and rank == 0:  # which keeps the store by which the others find out
            time.sleep(TIMEOUT + 6)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal")
@pytest.mark.parametrize("worlds", [1, 2])
def test_the_living_name_the_dead(tmp_path, worlds):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] if worlds == 2 else None
    context = forks.context()
    answers = context.Queue()
    given = str(tmp_path), port, answers
    processes = [context.Process(target=one_rank, args=(rank, *given), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()
    heard = [answers.get(timeout=60) for _ in range(RANKS - 1)]
    for process in processes:
        process.join(30)
    assert processes[DEAD].exitcode == -signal.SIGKILL
    assert sorted(rank for rank, _, _ in heard) == [rank for rank in range(RANKS) if rank != DEAD]
    for _, seconds, said in heard:
        assert seconds < TIMEOUT + 5 + 2
        assert worlds == 2 or "some targets are new and others not" in said
        assert f"no answer any more from rank {DEAD}" in said
