"""A rank dies during a redistribution: the others raise within the timeout, and nobody gets a wrong tensor."""

import datetime
import os
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import forks
from mesh_harness import needs_overlay

pytestmark = needs_overlay
RANKS, SECONDS, VICTIM = 4, 8, 2
SOURCE, TARGET = (Partial(), Shard(0)), (Replicate(), Shard(1))


class Met(NamedTuple):
    """What a rank got, or which error instead, and after how many seconds."""

    got: list | None
    error: str = ""
    seconds: float = 0.0


def expected(rank: int) -> list[list[float]]:
    """By hand: sums over dp, then from each tp rank its half of the rows, and of these the columns of this one."""
    totals = [float(first + first + 2) for first in (0, 1)]  # tp 0: ranks 0 and 2; tp 1: ranks 1 and 3
    return [[totals[0]] * 4] * 4 + [[totals[1]] * 4] * 4


def redistribute(mesh, rank: int) -> torch.Tensor:
    local = torch.full((4, 8), float(rank))
    return DTensor.from_local(local, mesh, SOURCE, run_check=False).redistribute(placements=TARGET).to_local()


def play(rank: int, port: int, said) -> None:
    """One rank: the redistribution once with everybody, then with one that dies before its second collective."""
    import torch_overlay
    from torch_overlay.distributed._mesh.state import shared_state
    from torch_overlay.distributed.tensor._planner.steps import AllToAll, Collective

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch_overlay.enable()
    store = dist.TCPStore("127.0.0.1", port, None, False, datetime.timedelta(seconds=60))
    limit = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=store, timeout=limit)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    said.put((rank, "first", Met(redistribute(mesh, rank).tolist())))
    if rank == VICTIM:
        (program,) = shared_state(mesh).remembered.answers.values()
        _, second = [step for step in program.steps if isinstance(step, Collective)]
        before = program.functions[:-3]  # the last three are the second's: pack, communicate, unpack
        assert isinstance(second, AllToAll) and before, program.text
        program.functions = (*before, lambda local: os._exit(0))
        said.close()
        said.join_thread()  # what it said is under way, and nobody waits for the rest of it
    start, got, error = time.monotonic(), None, ""
    try:
        got = redistribute(mesh, rank).tolist()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    said.put((rank, "second", Met(got, error, time.monotonic() - start)))


@pytest.fixture(scope="module")
def met():
    """(rank, when) to what the rank met."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = forks.context()
    said = context.Queue()
    ranks = [context.Process(target=play, args=(rank, store.port, said), daemon=True) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    results = {}
    try:
        for _ in range(2 * RANKS - 1):  # the one that dies says nothing more
            rank, when, what = said.get(timeout=240)
            results[rank, when] = what
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
    assert ranks[VICTIM].exitcode == 0, "it died of something else than its own exit"
    return results


def test_all_are_right_while_all_live(met):
    for rank in range(RANKS):
        assert met[rank, "first"].got == expected(rank)


def test_nobody_has_a_wrong_tensor(met):
    """Each survivor raises, or had all that it needs and has exactly the right values."""
    for rank in range(RANKS):
        if rank != VICTIM:
            what = met[rank, "second"]
            assert bool(what.error) != (what.got is not None), what
            assert what.error or what.got == expected(rank), what


def test_who_waits_for_the_dead_raises_within_the_timeout(met):
    """Its partner on the other axis may have had all that it needs; the one on its own can't have."""
    assert met[VICTIM + 1, "second"].error  # shares the second collective's group with it
    for rank in range(RANKS):
        if rank != VICTIM:
            assert met[rank, "second"].seconds < SECONDS + 4, met[rank, "second"]
