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
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_overlay
from mesh_harness import fake_world, group_ranks, needs_overlay
from torch_overlay.distributed._groups.finding import joint_group_name
from torch_overlay.distributed._groups.table import find_group
from torch_overlay.distributed._mesh.pickling import OfTheRank, _groups_here, bind_groups
from torch_overlay.distributed._mesh.rank_map import RankMap
from torch_overlay.distributed._mesh.state import OfSaver, lay_aside, wait_for_world
from torch_overlay.distributed._mesh_layout import _MeshLayout
from way import needs_package, overlay

pytestmark = needs_overlay


@pytest.fixture
def mesh():
    with fake_world(5, 8):
        yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))


@needs_package
def test_an_operator_keeps_the_mesh_that_has_groups_of_its_own(mesh):
    """Sharding propagation remembers specs by equal meshes: a view made in private must not stand for one outside."""
    outside = mesh["b", "c"]._flatten("bc")._unflatten(0, (2, 2), ("x", "y"))
    with torch_overlay.private_groups():
        inside = mesh["b", "c"]._flatten("bc")._unflatten(0, (2, 2), ("x", "y"))
    assert inside != outside and len({inside, outside}) == 2
    assert inside.get_group("x") is not outside.get_group("x")
    for one in (outside, inside, outside):
        assert (DTensor.from_local(torch.ones(2, 2), one, (Shard(0), Shard(1))) + 1).device_mesh is one


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


def test_views_are_made_anew_after_abort(mesh):
    mesh["b", "c"]._flatten("bc")
    mesh.abort()
    assert group_ranks(mesh["b", "c"]._flatten("bc"), "bc") == (4, 5, 6, 7)


def test_another_thread_may_find_out_the_rank_first(mesh):
    """Between two looks at what a loaded mesh holds, another thread bound it."""
    loaded = copy.copy(mesh)
    wait_for_world(loaded)
    del loaded.__dict__["_of_saver"]
    loaded.__dict__["_rank"] = 5
    assert OfTheRank.__get__(DeviceMesh.__dict__["_rank"], loaded, DeviceMesh) == 5


def test_another_thread_may_find_out_the_rank_and_some_groups_first(mesh):
    """Then the rank is no longer what the saver said of it."""
    loaded, names = copy.copy(mesh), ["one", "unbound", "unbound"]
    lay_aside(loaded, OfSaver({"_dim_group_names": ["1", "2", "3"]}, names, _groups_here()))
    assert (bind_groups(loaded)["_rank"], loaded._dim_group_names) == (5, names)


def test_ranks_and_a_layout_are_one_too_many(mesh):
    with pytest.raises(TypeError, match="passing explicit mesh"):
        DeviceMesh("cpu", [0, 1], _layout=_MeshLayout.from_sizes_strides((4,)), _rank_map=RankMap.identity(4))


@pytest.mark.parametrize("wrong", [5, ("gloo",), ("gloo", None, None), object()])
def test_what_is_no_backend_is_refused_before_anything_is_made(mesh, wrong):
    made = len(distributed_c10d._world.pg_map)
    with pytest.raises(TypeError, match="backend_override for dim 'tp' is the name of a backend"):
        init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), backend_override={"tp": wrong})
    assert len(distributed_c10d._world.pg_map) == made


def test_what_users_put_on_a_mesh_is_copied_under_any_name(mesh):
    mesh._note, mesh.note = {"of": "mine"}, [1]
    for copied in (copy.copy(mesh), copy.deepcopy(mesh)):
        assert (copied._note, copied.note) == ({"of": "mine"}, [1])
    assert copied._note is not mesh._note


def test_a_mesh_without_groups_makes_those_of_its_flattened_view():
    with fake_world(5, 8):
        mesh = DeviceMesh("cpu", torch.arange(8).reshape(2, 4), mesh_dim_names=("a", "b"), _init_backend=False)
        assert dist.get_process_group_ranks(mesh._flatten("ab").get_group()) == list(range(8))


def test_a_dim_is_a_whole_number_or_a_name(mesh):
    for wrong in ((), 0.0):
        with pytest.raises(AssertionError):
            mesh.get_group(wrong)


def test_a_mesh_without_names_has_none_to_permute():
    with fake_world(5, 8):
        mesh = init_device_mesh("cpu", (2, 4))
        for names in ((), ("a", "b")):
            with pytest.raises(ValueError, match=r"permute needs each name .* it has none"):
                mesh.permute(names)


def test_an_error_of_another_kind_stays_that_kind(mesh, monkeypatch):
    """A backend may say that it can't do it at all, or that there is no memory: callers tell these apart."""

    def refuse(*args, **kwargs):
        raise NotImplementedError("not here")

    monkeypatch.setattr(distributed_c10d, "new_group", refuse)
    with pytest.raises(NotImplementedError, match=r"^not here$"):
        init_device_mesh("cpu", (4, 2), mesh_dim_names=("x", "y"))


def test_mpi_beside_another_backend_is_mpi(mesh):
    from torch_overlay.distributed._groups.settings import members_create

    world = distributed_c10d._get_default_group()
    assert members_create(world, "gloo") and not members_create(world, "cpu:mpi,cuda:nccl")


@needs_package
def test_views_of_a_view_apart_are_apart_wherever_they_are_made(mesh):
    """Made outside the block, and loaded where the same meshes were made."""
    outside = mesh["b", "c"]._flatten("bc")._unflatten(0, (2, 2), ("x", "y"))
    with torch_overlay.private_groups():
        inside = mesh["b", "c"]._flatten("bc")._unflatten(0, (2, 2), ("x", "y"))
    deeper, other = (view._unflatten(1, (1, 2), ("p", "q")) for view in (inside, outside))
    assert deeper.get_group("q") is not other.get_group("q")
    flat = inside._flatten("xy")
    assert flat.get_group() is not mesh["bc"].get_group()
    loaded = pickle.loads(pickle.dumps(inside))
    loaded.__dict__["_dim_group_names"] = ["1", "2"]  # as another process named them
    elsewhere = pickle.loads(pickle.dumps(loaded))
    assert elsewhere.get_group("x") is inside.get_group("x") is not outside.get_group("x")


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


def test_a_rank_outside_makes_the_groups_after_abort_that_members_make():
    """Where all ranks make every group, one that doesn't would let the others wait."""

    def work():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mesh._flatten("f")
        mesh.abort()
        mesh._flatten("f")

    asked = asked_groups(1, work)
    assert len(asked) >= 4 and asked_groups(5, work) == asked


@pytest.mark.parametrize("given", [{"a": "fake"}, {"a": "fake", "b": "fake"}])
def test_a_rank_outside_makes_the_joint_groups_that_members_make(given):
    def work():
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override=given)

    asked = asked_groups(1, work)
    assert asked and asked_groups(5, work) == asked


def test_abort_ends_joint_groups():
    with fake_world(5, 8), overlay():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        name = joint_group_name(mesh, (0, 1))
        assert find_group(name) is not None
        mesh.abort()
        assert find_group(name) is None


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


def test_sizes_of_an_unflattened_axis_are_positive(mesh):
    with pytest.raises(ValueError, match="at least 1, on each axis, got"):
        mesh._unflatten(0, (-1, -2), ("x", "y"))


@pytest.mark.parametrize("value", [(3, 4), [None, "gloo"], ("gloo", "nccl")])
def test_a_pair_for_a_backend_is_a_name_and_options(value):
    with fake_world(0, 8), pytest.raises(TypeError, match="a pair of both"):
        init_device_mesh("cpu", (2, 4), backend_override={0: value})


def test_loaded_views_have_groups_of_their_kind():
    """A view that was made in a block of private_groups has its own groups, not those of another such view, and on an
    axis that it kept the mesh's; one that was made outside never has those of a block."""

    def views():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        with torch_overlay.private_groups():
            inside = [mesh._unflatten("tp", (2, 2), ("x", "y")) for _ in range(2)]
        return *inside, mesh._unflatten("tp", (2, 2), ("x", "y"))

    with fake_world(1, 8):
        made = views()
        saved = pickle.dumps(made)
        for view, loaded in zip(made, pickle.loads(saved), strict=True):
            assert loaded == view
            assert [loaded.get_group(name) is view.get_group(name) for name in ("dp", "x", "y")] == [True] * 3
    with fake_world(7, 8):  # rank 1 and rank 7 are in no group together
        for view, loaded in zip(views(), pickle.loads(saved), strict=True):
            assert [loaded.get_group(name) is view.get_group(name) for name in ("x", "y")] == [True] * 2
