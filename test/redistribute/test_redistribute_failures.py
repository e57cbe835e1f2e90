"""A rank dies during a redistribution: the others raise within the timeout, and nobody gets a wrong tensor."""

import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from mesh_harness import needs_overlay

pytestmark = needs_overlay
RANKS, SECONDS, VICTIM = 4, 8, 2
SOURCE, TARGET = (Partial(), Shard(0)), (Replicate(), Shard(1))


def redistribute(mesh, rank: int) -> torch.Tensor:
    local = torch.full((4, 8), float(rank))
    return DTensor.from_local(local, mesh, SOURCE, run_check=False).redistribute(placements=TARGET).to_local()


def play(rank: int, port: int, said) -> None:
    """One rank: the redistribution once with everybody, then with one that dies before its second collective."""
    import torch_overlay
    from torch_overlay.distributed.tensor import _planned as ours

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch_overlay.enable()
    store = dist.TCPStore("127.0.0.1", port, None, False, datetime.timedelta(seconds=60))
    limit = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=store, timeout=limit)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    said.put((rank, "first", redistribute(mesh, rank).tolist(), 0.0))
    if rank == VICTIM:
        (plan,) = ours._plans.values()
        assert len(plan.run) > 1, plan.text
        ours._plans[next(iter(ours._plans))] = plan._replace(run=(plan.run[0], lambda local: os._exit(0)))
    start, met = time.monotonic(), "nothing"
    try:
        redistribute(mesh, rank)
    except Exception as error:
        met = f"{type(error).__name__}: {error}"
    said.put((rank, "second", met, time.monotonic() - start))


@pytest.fixture(scope="module")
def met():
    """(rank, when) to what the rank met, and after how many seconds."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = torch.multiprocessing.get_context("spawn")
    said = context.Queue()
    ranks = [context.Process(target=play, args=(rank, store.port, said), daemon=True) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    results = {}
    try:
        for _ in range(2 * RANKS - 1):  # the one that dies says nothing more
            rank, when, what, seconds = said.get(timeout=120)
            results[rank, when] = what, seconds
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
    return results


def test_all_are_right_while_all_live(met):
    """Sums over dp, then the other half of the columns of the other tp rank."""
    for rank in range(RANKS):
        totals = [[float(first + first + 2)] * 4 for first in (0, 1)]  # tp 0: ranks 0 and 2; tp 1: ranks 1 and 3
        assert met[rank, "first"][0] == [totals[0]] * 4 + [totals[1]] * 4


def test_the_others_raise_within_the_timeout(met):
    """Those who wait for the dead rank; its partner on the other axis had all that it needs, or raises too."""
    for rank in range(RANKS):
        if rank != VICTIM:
            what, seconds = met[rank, "second"]
            assert seconds < SECONDS + 4, seconds
            if rank == VICTIM + 1:  # shares the second collective's group with it
                assert what.startswith("RuntimeError") or "Error" in what, what
    raised = [rank for rank in range(RANKS) if rank != VICTIM and met[rank, "second"][0] != "nothing"]
    assert VICTIM + 1 in raised
