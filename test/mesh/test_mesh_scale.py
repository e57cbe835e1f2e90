"""Over a million ranks: what a view holds doesn't grow with the world. Sizes and ratios of sizes, no clocks."""

import gc
import tracemalloc

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mesh_harness import fake_world, needs_overlay, overlay

pytestmark = needs_overlay
MILLION = 1_048_576
KEPT = 16 * 1024  # bytes that one view may hold


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """What is there before these tests is no business of the collector's, which they call hundreds of times."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="class")
def million():
    """(16384, 8, 8) as one of its ranks sees it."""
    with overlay(), fake_world(777_777, MILLION):
        yield init_device_mesh("cpu", (16384, 8, 8), mesh_dim_names=("dp", "cp", "tp"))


def memory_of(make) -> tuple[int, int]:
    """The bytes that stay allocated in Python after making one, and the peak; what it calls is warm."""
    make()
    gc.collect()
    tracemalloc.start()
    try:
        kept = make()
        gc.collect()
        return tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        del kept


VIEWS = {
    "slice": lambda mesh: mesh["cp"],
    "two axes": lambda mesh: mesh["dp", "tp"],
    "unflattened": lambda mesh: mesh._unflatten("cp", (2, 4), ("x", "y")),
    "permuted": lambda mesh: mesh.permute(("tp", "dp", "cp")),
    "concatenated": lambda mesh: DeviceMesh._concatenate([mesh["tp"], mesh["cp"]]),
    "elsewhere": lambda mesh: mesh.submesh_at("cp", at={"dp": 5, "tp": 3}),
}


class TestAMillionRanks:
    """On one mesh for all, since what its views say and hold doesn't depend on those before them."""

    @pytest.mark.parametrize("what", VIEWS)
    def test_a_view_of_a_million_ranks_is_small(self, million, what):
        """At most 16 KB each, hashed, compared and asked for all that it can say without a tensor (stock: 42 MB)."""

        def make():
            view = VIEWS[what](million)
            assert view == VIEWS[what](million) and isinstance(hash(view), int)
            assert view.get_coordinate() is None or len(view.get_coordinate()) == view.ndim
            return view, view.shape, view.size(), repr(view)

        held, peak = memory_of(make)
        assert held <= KEPT and peak <= 4 * KEPT

    def test_a_million_ranks_are_right(self, million):
        """Coordinates and lines, by arithmetic."""
        rank = 777_777
        assert tuple(million.get_coordinate()) == (rank // 64, rank // 8 % 8, rank % 8)
        assert million["cp"].mesh.tolist() == [rank // 64 * 64 + i * 8 + rank % 8 for i in range(8)]
        assert million["tp"].get_group().size() == 8 and million.get_group("dp").size() == 16384
        assert million.submesh_at("tp", at={"dp": 16383, "cp": 7}).mesh.tolist() == list(range(MILLION - 8, MILLION))


def test_a_permuted_million_is_stored_once():
    """A rank map that is no identity: one copy for the root and all views."""
    with fake_world(5, 65536):
        root = DeviceMesh("cpu", torch.arange(65535, -1, -1).reshape(1024, 8, 8), mesh_dim_names=("dp", "cp", "tp"))
        assert tuple(root.get_coordinate()) == (1023, 7, 2)
        assert memory_of(lambda: root["cp"])[0] <= KEPT
        assert memory_of(lambda: root._unflatten("cp", (4, 2), ("x", "y"))["x"])[0] <= 3 * KEPT
        assert root["tp"].mesh.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
