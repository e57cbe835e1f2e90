"""How many groups the meshes of a run take, and what building them costs at scale: integers and bytes, no clocks."""

import gc
import tracemalloc

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dims_twin import RECIPE, fake_world, group_ranks, overlay
from torch_overlay.parallel_dims import ParallelDims

# The recipe's inner degrees; pp and dp_replicate grow with the world.
AT_SCALE = {4096: dict(pp=4, dp_replicate=8, dp_shard=16, cp=2, tp=4, ep=32), 65536: dict(pp=16, dp_replicate=32)}
AT_SCALE[65536] |= {name: AT_SCALE[4096][name] for name in ("dp_shard", "cp", "tp", "ep")}


@pytest.fixture
def calls(monkeypatch) -> list:
    """The ranks of every group that torch is asked for, whoever asks: all ways lead through this function."""
    asked = []
    create = distributed_c10d._new_group_with_tag

    def counting(ranks=None, *arguments, **named):
        asked.append(tuple(map(int, ranks)))  # before 2.12 they come as a class of ours
        return create(ranks, *arguments, **named)

    monkeypatch.setattr(distributed_c10d, "_new_group_with_tag", counting)
    return asked


def open_groups() -> list[tuple[int, ...]]:
    """The ranks of every group that this rank is in, the world's own left out."""
    world = distributed_c10d._get_default_group()
    return [
        tuple(dist.get_process_group_ranks(group)) for group in distributed_c10d._world.pg_map if group is not world
    ]


# Groups of the recipe with a world mesh and without: then three meshes are three universes.
RECIPES = {True: 9 + 1, False: 13 + 3}


@pytest.mark.parametrize("rank", [0, 37, 63])
@pytest.mark.parametrize("world_group", RECIPES)
def test_the_groups_of_the_recipe(calls, rank, world_group):
    """64 ranks, nine sets: one group each and one for the whole, or for each mesh its own; and one of this rank alone
    for etp, which is 1. Stock takes 13 to 27."""
    with overlay(True), fake_world(rank, 64):
        dims = RECIPE.build("cpu", world_group=world_group)
        groups = open_groups()
        assert len([ranks for ranks in groups if len(ranks) > 1]) == RECIPES[world_group]
        assert groups.count((rank,)) == 1 and len(set(groups)) == 9 + 1 + 1
        assert sorted(ranks for ranks in calls if rank in ranks) == sorted(groups)
        axes = {group_ranks(dims[axis], axis) for axis in dims.axes}
        assert set(groups) | {tuple(range(64))} == axes | {tuple(range(64))}


@pytest.mark.parametrize("world_group", [True, False])
def test_stock_takes_a_group_for_each_axis_of_each_mesh(world_group):
    """The same sets in more groups: pp three times, dp_replicate and tp twice."""
    with overlay(False), fake_world(37, 64):
        RECIPE.build("cpu", world_group=world_group)
        groups = open_groups()
    assert len(groups) == 4 + 4 + 1 + 4 + 1 and len(set(groups)) == 10


@pytest.mark.parametrize("on", [True, False], ids=["overlay", "stock"])
@pytest.mark.parametrize("world", [16, 64])
def test_axes_of_degree_one_need_nobody(calls, on, world):
    """FSDP alone: all axes with more than one rank are the world; each of the six others has a group of this rank
    alone, so that each can be destroyed. On stock, where a mesh of such axes asks all ranks, one stands in for all."""
    with overlay(on), fake_world(3, world):
        dims = ParallelDims().build("cpu")
        assert calls == [(3,)] * (6 if on else 1) == open_groups()
        assert dims.enabled == ("world", "fsdp", "efsdp", "batch", "loss")
        alone = {dims[axis].get_group().group_name for axis in dims.axes if axis not in dims.enabled}
        assert len(alone) == (6 if on else 1)
        assert all(dims[axis].get_group() is dist.group.WORLD for axis in dims.enabled)


@pytest.mark.parametrize("world", AT_SCALE)
def test_groups_at_scale(calls, world):
    """A rank asks for its own ten groups and one for the whole at any size, and they have the right ranks."""
    degrees = AT_SCALE[world]
    rank = world // 3
    with overlay(True), fake_world(rank, world):
        dims = ParallelDims(**degrees).build("cpu")
        groups = open_groups()
        assert len(calls) == len(groups) == 11
        p, rest = divmod(rank, world // degrees["pp"])
        stage = range(p * (world // degrees["pp"]), (p + 1) * (world // degrees["pp"]))
        assert set(dims["loss"].mesh.tolist()) == {other for other in stage if other % 4 == rank % 4}
        assert dims["ep"].mesh.tolist() == list(range(rank // 32 * 32, rank // 32 * 32 + 32))
        assert dims["dp_replicate"].mesh.tolist() == [
            stage[0] + i * 128 + rest % 128 for i in range(degrees["dp_replicate"])
        ]


def kept_by_build(world: int) -> int:
    """Bytes of Python memory that the meshes and groups of one rank hold after building, and their peak on the way."""
    with overlay(True, flatten="existing"):  # without the group for the whole, which holds all ranks
        for _ in range(2):  # the second time everything that is imported or cached once is there
            with fake_world(world // 3, world):
                gc.collect()
                tracemalloc.start()
                dims = ParallelDims(**AT_SCALE[world]).build("cpu")
                gc.collect()
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                own = sum(dims[axis].size() for axis in dims.axes if axis != "world")
    return peak // own


def test_memory_follows_the_own_groups_not_the_world():
    """Peak bytes for each rank of the groups that this rank is in: 16 times the world, and no more for each."""
    small, large = kept_by_build(4096), kept_by_build(65536)
    assert large <= 1.25 * small
