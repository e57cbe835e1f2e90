"""How many groups the meshes of a run take, at any scale."""

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dims_twin import RECIPE, overlay
from mesh_harness import counted_groups, fake_world, group_ranks
from torch_overlay.parallel_dims import ParallelDims

# The recipe's inner degrees; pp and dp_replicate grow with the world.
AT_SCALE = {4096: dict(pp=4, dp_replicate=8, dp_shard=16, cp=2, tp=4, ep=32), 65536: dict(pp=16, dp_replicate=32)}
AT_SCALE[65536] |= {name: AT_SCALE[4096][name] for name in ("dp_shard", "cp", "tp", "ep")}


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
def test_the_groups_of_the_recipe(rank, world_group):
    """64 ranks, nine sets: one group each and one for the whole, or for each mesh its own; and one of this rank alone
    for etp, which is 1. Stock takes 13 to 27."""
    with overlay(True), fake_world(rank, 64), counted_groups() as calls:
        dims = RECIPE.build("cpu", world_group=world_group)
        groups = open_groups()
        assert len([ranks for ranks in groups if len(ranks) > 1]) == RECIPES[world_group]
        assert groups.count((rank,)) == 1 and len(set(groups)) == 9 + 1 + 1
        assert sorted(ranks for ranks in calls if rank in ranks) == sorted(groups)
        axes = {group_ranks(dims[axis], axis) for axis in dims.axes}
        assert set(groups) | {tuple(range(64))} == axes | {tuple(range(64))}


@pytest.mark.parametrize("on", [True, False], ids=["overlay", "stock"])
@pytest.mark.parametrize("world", [16, 64])
def test_axes_of_degree_one_need_nobody(on, world):
    """FSDP alone: all axes with more than one rank are the world; each of the six others has a group of this rank
    alone, so that each can be destroyed. On stock, where a mesh of such axes asks all ranks, one stands in for all."""
    with overlay(on), fake_world(3, world), counted_groups() as calls:
        dims = ParallelDims().build("cpu")
        assert calls == [(3,)] * (6 if on else 1) == open_groups()
        assert dims.enabled == ("world", "fsdp", "efsdp", "batch", "loss")
        alone = {dims[axis].get_group().group_name for axis in dims.axes if axis not in dims.enabled}
        assert len(alone) == (6 if on else 1)
        assert all(dims[axis].get_group() is dist.group.WORLD for axis in dims.enabled)


@pytest.mark.parametrize("world", AT_SCALE)
def test_groups_at_scale(world):
    """A rank asks for its own ten groups and one for the whole at any size, and they have the right ranks."""
    degrees = AT_SCALE[world]
    rank = world // 3
    with overlay(True), fake_world(rank, world), counted_groups() as calls:
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
