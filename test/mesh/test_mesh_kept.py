"""What stock's meshes keep, apart or at all: each case was lost once. On the fake backend."""

import copy
import gc
import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from mesh_harness import fake_world, needs_overlay
from torch_overlay.distributed._mesh.groups import joint_group_name
from torch_overlay.distributed._mesh.pickling import RankAttribute, _groups_here, bind_groups
from torch_overlay.distributed._mesh.state import SavedAttributes, lay_aside, wait_for_world
from torch_overlay.distributed._mesh.universe import find_group
from way import overlay

pytestmark = needs_overlay


@pytest.fixture
def mesh():
    with fake_world(5, 8):
        yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))


@pytest.mark.skipif(
    "_ranks" not in inspect.signature(dist.init_process_group).parameters, reason="a torch whose worlds name no ranks"
)
def test_a_world_with_a_name_of_its_ranks_leaves_that_name_alone():
    """A world of `_ranks` is named as groups are that only their members make."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2, _ranks=[0, 1])
    try:
        dist.new_group([0, 1], use_local_synchronization=True)
        assert len(set(distributed_c10d._world.pg_names.values())) == 2
    finally:
        dist.destroy_process_group()


def test_another_thread_may_find_out_the_rank_first(mesh):
    """Between two looks at what a loaded mesh holds, another thread bound it."""
    loaded = copy.copy(mesh)
    wait_for_world(loaded)
    del loaded.__dict__["_of_saver"]
    loaded.__dict__["_rank"] = 5
    assert RankAttribute.__get__(DeviceMesh.__dict__["_rank"], loaded, DeviceMesh) == 5


def test_another_thread_may_find_out_the_rank_and_some_groups_first(mesh):
    """Then the rank is no longer what the saver said of it."""
    loaded, names = copy.copy(mesh), ["one", "unbound", "unbound"]
    lay_aside(loaded, SavedAttributes({"_dim_group_names": ["1", "2", "3"]}, names, _groups_here()))
    assert (bind_groups(loaded)["_rank"], loaded._dim_group_names) == (5, names)


def test_a_mesh_without_groups_makes_those_of_its_flattened_view():
    with fake_world(5, 8):
        mesh = DeviceMesh("cpu", torch.arange(8).reshape(2, 4), mesh_dim_names=("a", "b"), _init_backend=False)
        assert dist.get_process_group_ranks(mesh._flatten("ab").get_group()) == list(range(8))


def test_two_processes_pickle_equal_meshes_alike():
    """Caches of compiled code make their keys from it."""
    saved = []
    for _ in range(2):
        with fake_world(5, 8):
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
            tensors = {"_rank_map": None, "mesh": None}  # their bytes are storage's
            saved.append(pickle.dumps({**mesh.__getstate__(), **tensors}))
    assert saved[0] == saved[1]


def asked_groups(rank, work, **options):
    """The ranks of the groups that a rank makes while it works, one after the other."""
    asked = []

    def new_group(ranks=None, *arguments, **given):
        asked.append((tuple(ranks), given.get("backend"), given.get("pg_options")))
        return real(ranks, *arguments, **given)

    with fake_world(rank, 8), overlay(create="world", **options), pytest.MonkeyPatch.context() as patched:
        real = distributed_c10d.new_group  # before torch 2.12 the overlay's, which takes the order of ranks
        patched.setattr(distributed_c10d, "new_group", new_group)
        patched.setattr(dist, "new_group", new_group)
        work()
    return asked


def on_four(*backends: str) -> DeviceMesh:
    """A mesh of the first four ranks, of which rank 1 is one and rank 5 isn't."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override=dict(zip("ab", backends)))


def flattened_again_after_abort():
    mesh = on_four()
    mesh._flatten("f")
    mesh.abort()
    mesh._flatten("f")


@pytest.mark.parametrize(
    "work", [lambda: on_four("fake"), lambda: on_four("fake", "fake"), flattened_again_after_abort]
)
def test_a_rank_outside_makes_the_groups_that_members_make(work):
    """Where all ranks make every group, one that doesn't would let the others wait."""
    asked = asked_groups(1, work)
    assert asked and asked_groups(5, work) == asked


def test_a_flattened_xla_mesh_has_no_group():
    with fake_world(0, 4):
        there = len(distributed_c10d._world.pg_names)
        DeviceMesh("xla", torch.arange(4).view(2, 2), mesh_dim_names=("a", "b"))["b"]._flatten("w")
        assert len(distributed_c10d._world.pg_names) == there


class SaysLittle(DeviceMesh):
    """A mesh of a subclass that sets what it knows, without a rank."""

    def __init__(self, like):
        for name in ("_device_type", "_layout", "_rank_map", "_mesh_dim_names", "_flatten_mapping", "_dim_group_names"):
            setattr(self, name, getattr(like, name))
        self._root_mesh, self._hash, self._thread_id = None, None, None


def test_a_slice_of_a_subclass_that_says_no_rank_has_coordinates(mesh):
    assert tuple(SaysLittle(mesh)["b"].get_coordinate()) == (0,) and SaysLittle(mesh)["c"].get_local_rank() == 1


def test_a_loaded_mesh_keeps_the_joint_groups_that_it_names():
    """Its universe isn't left while it lives, though the mesh that was saved is gone."""
    with fake_world(5, 8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        loaded = pickle.loads(pickle.dumps(mesh))
        name = joint_group_name(loaded, (0, 1))
        for axis in ("a", "b"):
            dist.destroy_process_group(mesh.get_group(axis))
        del mesh
        gc.collect()
        init_device_mesh("cpu", (4, 2), mesh_dim_names=("x", "y"))
        assert find_group(name) is not None and joint_group_name(loaded, (0, 1)) == name
