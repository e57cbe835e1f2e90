"""How many groups real trainers get: integers, each with what stock makes beside it."""

import gc

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mesh_harness import STOCK, counted_groups, fake_world, group_ranks, needs_overlay, open_groups, overlay, quiet
from way import needs_package

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


# Groups on a rank, the world's own not counted: one a name, or one for each set of ranks; and one for the whole.
SHARED = {"names": (10 + 1, 5 + 1), "ranks": (9 + 1, 2 + 1), "off": (18, 5)}


@pytest.mark.parametrize("share", SHARED)
@pytest.mark.parametrize("rank", [0, 37, 63])
def test_torchtitan_makes_one_group_for_each_name(rank, share):
    """64 ranks, 9 different sets of ranks: stock makes 18 groups on each rank."""
    with overlay(share_groups=share), fake_world(rank, 64), counted_groups() as calls:
        meshes = torchtitan_views(64, **DEGREES)
        sets = {group_ranks(mesh, axis) for mesh, axis in axes_of(meshes)} - {tuple(range(64))}
        assert len(sets) == 9
        assert len(open_groups()) - 1 == (18 if STOCK else SHARED[share][0])
        whole = {tuple(range(64))} if share != "off" else set()
        assert {ranks for ranks in calls if rank in ranks} == sets | whole or STOCK
        assert all(rank in group_ranks(mesh, axis) for mesh, axis in axes_of(meshes))


# On 16 ranks as (2, 2, 4), those of rank 7. spmd_types, on which torchtitan trains, has an axis for each layout of a
# group's ranks, and calls it as the group is called.
AXES = {
    ("world",): range(16),
    ("batch", "loss", "dp"): range(3, 16, 4),
    ("tp", "ep"): range(4, 8),
    ("dp_shard", "efsdp"): [3, 7],
    ("dp_replicate",): [7, 15],
    ("pp",): [7],
    ("cp",): [7],
}


@pytest.mark.parametrize("share", ["off", "names", "ranks"])
def test_axes_of_torchtitan_have_the_ranks_and_names_of_stock(share):
    """Where axes of several names share a group, which they don't by default, it is called by all of them."""
    with overlay(share_groups=share), fake_world(7, 16):
        meshes = torchtitan_views(16, pp=1, dp_replicate=2, dp_shard=2, cp=1, tp=4, ep=4)
        groups = {(name, mesh.get_group(name)) for mesh in meshes for name in mesh.mesh_dim_names}
        ranks = {name: dist.get_process_group_ranks(group) for name, group in groups}
        said = {(name, group.group_desc) for name, group in groups}
    assert ranks == {name: list(those) for names, those in AXES.items() for name in names}
    together = share == "ranks" and not STOCK
    called = {(name, ",".join(names) if together else name) for names in AXES for name in names}
    assert said == {(name, "default_pg" if name == "world" else f"mesh_{words}") for name, words in called}


@pytest.mark.parametrize("share", SHARED)
def test_accelerate_flattens_one_axis_three_times(share):
    """accelerate on FSDP and TP, 8 x 8: stock makes 5 groups on each rank over 2 sets of ranks."""
    with overlay(share_groups=share), fake_world(0, 64), quiet():
        mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp_shard", "tp"))
        flat = [mesh["dp_shard",]._flatten(name) for name in ("dp", "dp_shard_cp", "dp_cp")]
        assert len(open_groups()) - 1 == (5 if STOCK else SHARED[share][1])
        assert {group_ranks(one, 0) for one in flat} == {group_ranks(mesh, "dp_shard")}


@pytest.mark.parametrize("share", ["names", "ranks"])
@pytest.mark.parametrize("world", [64, pytest.param(8192, marks=needs_overlay)])
def test_axes_of_size_one_cost_little_at_any_scale(world, share):
    """(1, W, 1, 1): one call for each axis of one rank; stock makes one for every rank and axis (3 W calls)."""
    with overlay(share_groups=share), fake_world(3, world), counted_groups() as calls:
        mesh = init_device_mesh("cpu", (1, world, 1, 1), mesh_dim_names=("pp", "dp", "cp", "tp"))
        assert len(calls) == (3 * world if STOCK else 3)
        assert [group_ranks(mesh, axis) for axis in ("pp", "cp", "tp")] == [(3,)] * 3
        assert group_ranks(mesh, "dp") == tuple(range(world))
        assert len(set(mesh._dim_group_names)) == 4, "a loop that destroys the group of every axis must find each once"


@needs_package  # upstream, too, but with other numbers
def test_a_mesh_that_was_destroyed_leaves_little():
    """A world keeps the universes of its meshes, for files that name them. It was 27 objects for each."""

    def build_and_destroy():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for group in mesh.get_all_groups():
            dist.destroy_process_group(group)

    with fake_world(1, 4):
        for _ in range(5):
            build_and_destroy()
        gc.collect()
        before, rounds = len(gc.get_objects()), 40
        for _ in range(rounds):
            build_and_destroy()
        gc.collect()
        left = len(gc.get_objects()) - before
        assert left <= 18 * rounds
