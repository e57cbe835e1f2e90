"""What ranks write into the store to compare their meshes; ranks are threads here, and there is no group."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_overlay.distributed import _mesh_check
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
def compare(monkeypatch):
    """Ranks compare these lines in a world on the one store; what each was told, or None."""
    here, store = threading.local(), dist.HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_group", lambda: here.world)
    monkeypatch.setattr(_mesh_check, "_timeout_seconds", lambda world: 10.0)

    def told(number: int, line: str) -> str | None:
        here.world = World(number)
        distributed_c10d._world.pg_map[here.world] = "gloo", store
        try:
            _mesh_check._compare("mesh_check/1", line, _mesh_check.MESH)
        except RuntimeError as error:
            return str(error)
        finally:
            del distributed_c10d._world.pg_map[here.world]
        return None

    def compared(*lines: str) -> list[str | None]:
        with ThreadPoolExecutor(RANKS) as ranks:
            return list(ranks.map(told, range(RANKS), lines))

    return SimpleNamespace(run=compared, store=store)


def test_what_a_world_compared_does_not_answer_the_next(compare):
    """A world after this one may be opened on its store, and begins to count again: a rank that found the verdict of
    before went on, and one that found no rank's new line raised."""
    assert compare.run("(4)", "(4)", "(4)", "(4)") == [None] * RANKS
    said = compare.run("(4)", "(4)", "(2, 2)", "(4)")
    assert all("ranks 0, 1, 3 build (4); ranks 2 build (2, 2)" in words for words in said)
    assert compare.run("(4)", "(4)", "(4)", "(4)") == [None] * RANKS
    assert compare.store.num_keys() == 0
