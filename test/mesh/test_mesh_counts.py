"""How many groups real trainers get: integers, each with what stock makes beside it."""

import pytest
from torch.distributed.device_mesh import init_device_mesh

from mesh_harness import STOCK, counted_groups, fake_world, group_ranks, needs_overlay, open_groups, quiet

DEGREES = dict(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2, ep=8)


def torchtitan_views(world: int, pp: int, dp_replicate: int, dp_shard: int, cp: int, tp: int, ep: int):
    """torchtitan's meshes for a mixture of experts: views of one world, and the loss flattened from one."""
    root = init_device_mesh("cpu", (world,), mesh_dim_names=("world",))
    dp, efsdp = dp_replicate * dp_shard, dp_shard * cp * tp // ep

    def view(**axes):
        return root._unflatten(0, tuple(axes.values()), tuple(axes))

    loading = view(pp=pp, batch=dp, cp=cp, tp=tp)
    loss = loading["batch", "cp"]._flatten("loss")
    storage = view(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp)
    dense = view(pp=pp, dp=dp, cp=cp, tp=tp)
    sparse = view(pp=pp, dp_replicate=dp_replicate, efsdp=efsdp, ep=ep)
    return [root, loading, loss, storage, dense, sparse]


def axes_of(meshes):
    return [(mesh, axis) for mesh in meshes for axis in range(mesh.ndim)]


@pytest.mark.parametrize("rank", [0, 37, 63])
def test_torchtitan_makes_one_group_for_each_set_of_ranks(rank):
    """64 ranks: the world's group and 9 new ones on each rank; stock makes 18 for the same 9 sets."""
    with fake_world(rank, 64), counted_groups() as calls:
        meshes = torchtitan_views(64, **DEGREES)
        sets = {group_ranks(mesh, axis) for mesh, axis in axes_of(meshes)} - {tuple(range(64))}
        assert len(sets) == 9
        assert len(open_groups()) - 1 == (18 if STOCK else 9)
        assert sorted(calls.of(rank)) == sorted(sets) or STOCK
        assert all(rank in group_ranks(mesh, axis) for mesh, axis in axes_of(meshes))


@needs_overlay
def test_equal_axes_of_torchtitan_hold_the_same_object():
    """Whatever the view and the name: tensor parallelism is one group."""
    with fake_world(5, 64):
        _, loading, _, storage, dense, sparse = torchtitan_views(64, **DEGREES)
        for axis in ("pp", "cp", "tp"):
            assert loading.get_group(axis) is storage.get_group(axis) is dense.get_group(axis)
        assert loading.get_group("batch") is dense.get_group("dp")
        assert storage.get_group("dp_replicate") is sparse.get_group("dp_replicate")


def test_accelerate_flattens_one_axis_three_times_for_nothing():
    """accelerate on FSDP and TP, 8 x 8: 2 groups on each rank; stock makes 5."""
    with fake_world(0, 64), quiet():
        mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp_shard", "tp"))
        flat = [mesh["dp_shard",]._flatten(name) for name in ("dp", "dp_shard_cp", "dp_cp")]
        assert len(open_groups()) - 1 == (5 if STOCK else 2)
        assert {group_ranks(one, 0) for one in flat} == {group_ranks(mesh, "dp_shard")}


@pytest.mark.parametrize("world", [64, pytest.param(8192, marks=needs_overlay)])
def test_axes_of_size_one_cost_nothing_at_any_scale(world):
    """(1, W, 1, 1): one group of one rank serves all; stock asks for one per rank and axis (3 W calls)."""
    with fake_world(3, world), counted_groups() as calls:
        mesh = init_device_mesh("cpu", (1, world, 1, 1), mesh_dim_names=("pp", "dp", "cp", "tp"))
        assert len(calls) == 3 * world if STOCK else len(calls) <= 2
        assert [group_ranks(mesh, axis) for axis in ("pp", "cp", "tp")] == [(3,)] * 3
        assert group_ranks(mesh, "dp") == tuple(range(world))


@needs_overlay
def test_a_rank_calls_only_for_its_own_groups_where_members_create():
    """(64, 8, 8): 3 calls on a rank, not one for each of the 1,088 groups, where the release can leave others out."""
    with fake_world(9, 4096), counted_groups() as calls:
        mesh = init_device_mesh("cpu", (64, 8, 8), mesh_dim_names=("a", "b", "c"))
        assert [len(group_ranks(mesh, axis)) for axis in "abc"] == [64, 8, 8]
        assert len(calls.of(9)) == 3
        assert len(calls) == 3 or not members_create()


def members_create() -> bool:
    """From 2.14 a group's hashed name no longer depends on which other groups this rank is in."""
    import torch

    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


@needs_overlay
def test_a_mesh_rebuilt_in_a_loop_makes_no_new_groups():
    """Roots, slices and flattens again and again: after the first turn everything is found."""
    with fake_world(2, 8):
        for turn in range(5):
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
            mesh["dp"], mesh._flatten("all"), mesh._unflatten("tp", (2, 2), ("x", "y"))
            if turn == 0:
                first = open_groups()
        assert open_groups() == first
