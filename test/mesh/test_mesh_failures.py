"""Ranks that disagree, stay away or die: an error on every rank, within the timeout, that says who. Stock hangs."""

import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import forks
from mesh_harness import needs_overlay
from way import needs_package

pytestmark = needs_overlay
RANKS, SECONDS = 4, 8


def grid(*sizes: int, names=("dp", "tp")):
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def different_shapes(rank: int):
    return grid(*((4, 1) if rank == 2 else (2, 2)))


def different_names(rank: int):
    return grid(2, 2, names=("dp", "ep") if rank in (1, 3) else ("dp", "tp"))


def different_order(rank: int):
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", [0, 1, 3, 2] if rank == 3 else [0, 1, 2, 3])


def different_options(rank: int):
    import torch_overlay

    if rank == 1:
        torch_overlay.enable(flatten="existing")
    return grid(2, 2)


def different_versions(rank: int):
    from torch_overlay.distributed import config

    if rank == 0:
        config.build += ".1"
    return grid(2, 2)


def one_stays_away(rank: int):
    if rank == 3:
        time.sleep(SECONDS)
        raise RuntimeError("rank 3 did something else")
    return grid(2, 2)


def one_dies(rank: int):
    if rank == 3:
        os._exit(0)
    return grid(2, 2)


# Three sets of ranks, for most of the time they wait. The checks compare meshes; the death is met without.
PARTS = [[different_shapes, different_names, different_order, different_options, different_versions]]
PARTS += [[one_stays_away], [one_dies]]


def play(rank: int, part: int, port: int, said) -> None:
    """One rank through scenes, each in a world of its own; what it met goes to the parent."""
    import torch_overlay

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=SECONDS)
    store = dist.TCPStore("127.0.0.1", port, None, False, datetime.timedelta(seconds=60))
    for scene in PARTS[part]:
        torch_overlay.enable(check_mesh=scene is not one_dies)
        store.add(f"ready/{scene.__name__}", 1)
        while store.add(f"ready/{scene.__name__}", 0) < RANKS:
            time.sleep(0.05)
        world = dist.PrefixStore(f"world/{scene.__name__}", store)
        dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=world, timeout=limit)
        start, met = time.monotonic(), "nothing"
        try:
            scene(rank)
        except Exception as error:
            met = f"{type(error).__name__}: {error}"
        said.put((scene.__name__, rank, met, time.monotonic() - start))
        dist.destroy_process_group()
        torch_overlay.disable()


@pytest.fixture(scope="module")
def met():
    """(scene, rank) to (what the rank met, seconds)."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = forks.context()
    said = context.Queue()
    given = [(rank, part, store.port, said) for part in range(len(PARTS)) for rank in range(RANKS)]
    ranks = [context.Process(target=play, args=each, daemon=True) for each in given]
    for rank in ranks:
        rank.start()
    results = {}
    try:
        for _ in range(RANKS * sum(map(len, PARTS)) - 1):  # the one that dies says nothing
            scene, rank, what, seconds = said.get(timeout=120)
            results[scene, rank] = what, seconds
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
    return results


@pytest.mark.parametrize(
    "scene, who",
    [
        ("different_shapes", "rank 2 builds"),
        ("different_names", "ranks 1, 3 build"),
        ("different_order", "rank 3 builds"),
        pytest.param("different_options", "rank 1 runs torch", marks=needs_package),
        pytest.param("different_versions", "rank 0 runs torch", marks=needs_package),
    ],
)
def test_every_rank_is_told_who_builds_another_mesh(met, scene, who):
    """Or runs another release, version of the package or option. At once, not after the timeout."""
    for rank in range(RANKS):
        what, seconds = met[scene, rank]
        assert what.startswith("RuntimeError") and who in what, what
        assert seconds < SECONDS, seconds


def test_every_rank_is_told_who_stayed_away(met):
    for rank in range(3):
        what, seconds = met["one_stays_away", rank]
        assert what.startswith("RuntimeError") and "rank 3 didn" in what, what
        assert seconds <= SECONDS + 2, seconds


def test_the_others_hear_of_a_rank_that_died(met):
    """Without the check: the axis and its ranks are named, and nobody waits longer than the timeouts of two groups."""
    for rank in range(3):
        what, seconds = met["one_dies", rank]
        # where a store waits in vain, torch has an error of its own
        assert what.startswith(("RuntimeError", "DistStoreError")) and ("dp" in what or "tp" in what), what
        assert "If some of them were out of reach" in what and seconds <= 2 * SECONDS + 2, (what, seconds)
