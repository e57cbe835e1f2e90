"""The tests that travel with the stack run here under the overlay; upstream there is nothing to turn on."""

import contextlib
import importlib.util

import pytest
from torch.distributed import device_mesh
from torch.distributed.tensor import _dtensor_spec, _redistribute

from way import WAY, overlay
from width import sample

UNORDERED = ("nested_strided_shards_are_refused", "become_strided_shards", "below_a_new_strided_shard")


def pytest_collection_modifyitems(items):
    """Upstream's compiled code makes views; before 2.12 dynamo knows meshes in another way. Before 2.10 torch
    lacks DebugMode, and what a test of merging clears between its threads."""
    known = hasattr(device_mesh, "_register_distributed_opaque_types")
    clears = hasattr(_redistribute, "clear_redistribute_planner_cache")
    orders = hasattr(_dtensor_spec, "ShardOrderEntry")
    merges = hasattr(_redistribute, "_optimize_transform_infos")
    lists = importlib.util.find_spec("torch.utils._debug_mode") is not None
    for item in items:
        if item.name.startswith("test_debug_mode") and not lists:
            item.add_marker(pytest.mark.skip(reason="before 2.10 torch has no DebugMode"))
        if "an_order_of_mesh_dims" in item.name and not orders:
            item.add_marker(pytest.mark.skip(reason="before 2.10 a spec says no order of mesh dims"))
        if "no_order_beside_their_factors" in item.name and not merges:
            item.add_marker(pytest.mark.skip(reason="before 2.11 the factors decide, whatever order there is"))
        if item.path.name == "test_merging.py" and item.name.endswith(UNORDERED) and not merges:
            item.add_marker(pytest.mark.skip(reason="before 2.11 torch refuses strided shards that say no order"))
        if item.name.endswith("merge_with_either_planner") and not merges:
            item.add_marker(pytest.mark.skip(reason="before 2.11 torch merges no steps"))
        if "TestStableHash" in item.nodeid and not hasattr(_dtensor_spec.DTensorSpec, "_stable_hash"):
            item.add_marker(pytest.mark.skip(reason="before 2.12 a spec has no stable hash"))
        if item.name.endswith("in_one_graph") and not known:
            item.add_marker(pytest.mark.skip(reason="before 2.12 dynamo knows little of meshes"))
        if item.path.name in ("test_merging.py", "test_merged_steps.py") and not clears:
            item.add_marker(pytest.mark.skip(reason="before 2.10 torch has no cache to clear"))


@pytest.fixture(autouse=True)
def overlay_on():
    """The overlay around each test, on before the first mesh and off at the end; nothing on a torch with the stack."""
    if WAY == "stock":
        pytest.skip("what only the overlay does")
    with contextlib.nullcontext() if WAY == "patched" else overlay():
        yield


@pytest.fixture(autouse=True)
def fewer_pairs(request, monkeypatch):
    """Of pairs on three mesh dims, whose steps are run by value, one of five; all at night, and on the stack itself."""
    if WAY == "overlay" and request.path.name in ("test_planner_moves.py", "test_planner_reductions.py"):
        every = request.module.pairs
        threes = lambda *ends: sample(every(*ends), 5)
        monkeypatch.setattr(
            request.module, "pairs", lambda *ends, **how: every(*ends, **how) if how or len(ends) > 2 else threes(*ends)
        )
