"""What ranks write into the store to compare their meshes; ranks are threads here, and there is no group."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_overlay.distributed import config
from torch_overlay.distributed._mesh import compare
from torch_overlay.distributed._mesh.rank_map import RankMap
from way import needs_overlay

pytestmark = needs_overlay
RANKS = 4


class World:
    """One rank's default group."""

    def __init__(self, number: int) -> None:
        self.number = number

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return RANKS


@pytest.fixture
def compared(monkeypatch):
    """Ranks compare these lines in a world on the one store; what each was told, or None."""
    here, store = threading.local(), dist.HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_group", lambda: here.world)
    monkeypatch.setattr(distributed_c10d, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(config, "mesh_check", True)
    made = SimpleNamespace(store=store, seconds=10.0)
    monkeypatch.setattr(compare, "_timeout_seconds", lambda world: made.seconds)
    met = threading.Barrier(RANKS)

    def told(number: int, line: str | None) -> str | None:
        here.world = World(number)
        met.wait()  # as ranks do that open a world
        if line is None:
            return "stayed away"
        distributed_c10d._world.pg_map[here.world] = "gloo", store
        try:
            compare.leave_line(lambda: line, RankMap(range(RANKS)))
            compare.check_same_mesh()
        except RuntimeError as error:
            return str(error)
        finally:
            del distributed_c10d._world.pg_map[here.world]
        return None

    def compared(*lines: str | None) -> list[str | None]:
        with ThreadPoolExecutor(RANKS) as ranks:
            return list(ranks.map(told, range(RANKS), lines))

    made.run = compared
    return made


def test_what_a_world_compared_does_not_answer_the_next(compared):
    """A world after this one may be opened on its store, and begins to count again: a rank that found the verdict of
    before went on, and one that found no rank's new line raised."""
    assert compared.run("(4)", "(4)", "(4)", "(4)") == [None] * RANKS
    said = compared.run("(4)", "(4)", "(2, 2)", "(4)")
    assert all("ranks 0, 1, 3 build (4); rank 2 builds (2, 2)" in words for words in said)
    assert compared.run("(4)", "(4)", "(4)", "(4)") == [None] * RANKS
    assert compared.store.num_keys() == RANKS, "the lines alone"


@pytest.mark.parametrize("away", [0, 3])
def test_what_ranks_left_that_gave_up_does_not_answer_the_next(compared, away):
    """Their answer is still in the store, and so is how many of them came."""
    lines = ["(4)"] * RANKS
    compared.seconds = 0.5
    said = compared.run(*[None if rank == away else line for rank, line in enumerate(lines)])
    wanted = (
        f"Not all 4 ranks came to compare their meshes within 0.5 s. rank{'s 1-3' if away == 0 else 's 0-2'} build (4)"
    )
    assert said.pop(away) == "stayed away" and all(wanted in words for words in said), said
    assert all(f"rank {away} came to no mesh yet" in words for words in said), said
    compared.seconds = 10.0
    assert compared.run(*lines) == [None] * RANKS
    said = compared.run("(4)", "(2, 2)", "(4)", "(4)")
    assert all("ranks 0, 2, 3 build (4); rank 1 builds (2, 2)" in words for words in said)
