"""Every combination of degrees of worlds of 8, 24 and 64 ranks, against the twin of nested loops."""

import itertools

import pytest

from dims_twin import Twin, all_degrees, overlay
from mesh_harness import fake_world, group_ranks
from torch_overlay.parallel_dims import ParallelDims
from width import sample

WORLDS = (8, 24, 64)
NAMES = {
    "world": ("world",),
    "dense": ("pp", "dp_replicate", "fsdp", "tp"),
    "sparse": ("pp", "dp_replicate", "efsdp", "ep", "etp"),
    "data": ("pp", "batch", "cp", "tp"),
    "loss": ("loss",),
}


def check(dims, twin: Twin, rank: int, shared: bool) -> None:
    """Every mesh is the twin's on all ranks, and so is every group of this rank."""
    objects: dict[tuple[int, ...], set[int]] = {}
    for what, names in NAMES.items():
        mesh = getattr(dims, what)
        assert mesh.mesh_dim_names == names
        assert mesh.shape == twin.shape(what)
        if what != "loss":
            assert mesh.mesh.flatten().tolist() == list(range(twin.world_size))
    for what, axis in twin.axes():
        groups = twin.groups(what, axis)
        assert sorted(itertools.chain(*groups)) == list(range(twin.world_size))
        own = next(ranks for ranks in groups if rank in ranks)
        mesh = getattr(dims, what)
        assert group_ranks(mesh, axis) == tuple(dims[axis].mesh.tolist()) == own
        assert dims[axis] == mesh[axis]
        objects.setdefault(own, set()).add(id(mesh.get_group(axis)))
    assert dims.enabled == tuple(axis for axis in dims.axes if dims[axis].size() > 1)
    if shared:  # a group of one rank is no communicator, and each axis has its own
        assert all(len(groups) == 1 for ranks, groups in objects.items() if len(ranks) > 1)


@pytest.mark.parametrize("size", WORLDS)
def test_all_degrees_under_the_overlay(size):
    """Each named mesh has the twin's ranks, each axis's groups partition the world, equal rank sets share one group.

    The tables of the meshes are checked for all ranks at once; the rank that looks changes from one to the next. Of 24
    ranks it is every 15th combination, of 64 every 40th, and all of them at night.
    """
    every = {8: 1, 24: 15, 64: 40}[size]
    for turn, rank in enumerate((0, size // 3, size - 1)):
        with overlay(True, share_groups="ranks"), fake_world(rank, size):
            combinations = sample(all_degrees(size), every)
            for degrees in itertools.islice(combinations, turn, None, 3):
                check(ParallelDims(**degrees).build("cpu"), Twin(**degrees), rank, shared=True)


@pytest.mark.parametrize("size, every", [(8, 4), (24, 40), (64, 250)])
def test_degrees_on_stock_torch(size, every):
    """The same meshes without the overlay; what differs is only that equal rank sets have several groups."""
    for number, degrees in enumerate(itertools.islice(all_degrees(size), 0, None, every)):
        with overlay(False), fake_world(number % size, size):
            check(ParallelDims(**degrees).build("cpu"), Twin(**degrees), number % size, shared=False)


@pytest.mark.parametrize("on", [True, False], ids=["overlay", "stock"])
def test_without_a_world_group_the_meshes_are_the_same(on):
    for number, degrees in enumerate(itertools.islice(all_degrees(8), 0, None, 4)):
        with overlay(on), fake_world(number % 8, 8):
            ours = ParallelDims(**degrees).build("cpu", world_group=False)
            theirs = ParallelDims(**degrees).build("cpu")
            assert ours.world is None and "world" not in ours.axes
            for axis in ours.axes:
                assert ours[axis] == theirs[axis]
                assert group_ranks(ours[axis], axis) == group_ranks(theirs[axis], axis)


@pytest.mark.parametrize("size", WORLDS)
def test_any_one_degree_is_inferred(size):
    """-1 stands for the degree that was there; for ep and etp, for the most that the others leave."""
    for degrees in all_degrees(size):
        whole = ParallelDims(**degrees)
        assert whole.fit(size) == whole
        for name in degrees:
            found = ParallelDims(**degrees | {name: -1}).fit(size)
            if name in ("ep", "etp"):
                assert found.ep * found.etp == found.dp_shard * found.cp * found.tp
                assert found.sizes()["efsdp"] == 1
            else:
                assert found == whole
