"""What releases do each in their own way: slices that old ones refuse, and files that go from one to another."""

import contextlib
import copy
import importlib
import io
import pickle

import pytest
import torch
import torch.distributed.tensor  # weights_only asks for it
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources, init_device_mesh

import torch_overlay
from mesh_harness import STOCK, fake_world, group_ranks, needs_overlay
from torch_overlay.distributed._mesh.pickling import saved_state
from torch_overlay.distributed._mesh.state import view_of
from way import TENSOR_MESHES, needs_package

# How releases before 2.13 wrote layouts, and before 2.10 meshes; a torch that carries the stack reads what it wrote.
OLD_FORMS = ("nested", "bare", "tensor")


@pytest.fixture(autouse=True)
def world():
    """Rank 5 of 16."""
    with fake_world(5, 16):
        yield


@needs_overlay  # 2.10 to 2.12 refuse these
@pytest.mark.parametrize(
    ("flattened", "asked", "ranks"),
    [
        (("o",), ("f", "b", "c", "d"), [[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]]),
        (("o",), ("f", "c"), [[5, 7]]),
        (("b", "o"), ("f", "c"), [[1, 3], [5, 7]]),
        (("a", "o", "b"), ("f", "c"), [[1, 3], [5, 7], [9, 11], [13, 15]]),
        (("a", "c"), ("f",), [5, 7, 13, 15]),
        (("a", "c"), ("f", "d"), [[4, 5], [6, 7], [12, 13], [14, 15]]),
        (("a", "o", "c"), ("f", "d"), [[4, 5], [6, 7], [12, 13], [14, 15]]),
        (("b", "d"), ("a", "f"), [[0, 1, 4, 5], [8, 9, 12, 13]]),
    ],
)
def test_slices_hold_flattened_views_of_any_axes(flattened, asked, ranks):
    """Of one rank, and of axes that don't lie side by side: the ranks and the groups of every axis of the slice."""
    mesh = init_device_mesh("cpu", (2, 1, 2, 2, 2), mesh_dim_names=("a", "o", "b", "c", "d"))
    mesh[flattened]._flatten("f")
    piece = mesh[asked]
    assert piece.mesh.tolist() == ranks
    place = piece.get_coordinate()
    for axis in range(piece.ndim):
        line = piece.mesh[(*place[:axis], slice(None), *place[axis + 1 :])]
        assert group_ranks(piece, axis) == tuple(line.tolist())


def as_saved(mesh, form):
    """Its layout as a file of a release holds it: a list of axes since 2.13, nested tuples before."""
    axes = view_of(mesh).layout.axes
    _mesh_layout = importlib.import_module("torch.distributed._mesh_layout")  # before 2.10 ours, while it is on
    layout = object.__new__(_mesh_layout._MeshLayout)
    if form == "axes":
        flats = []
        for axis in axes:
            flats.append(object.__new__(_mesh_layout._FlatLayout))
            flats[-1].__dict__.update(shape=axis.shape, stride=axis.stride)
        layout.__dict__.update(axes=tuple(flats))
    else:
        pairs = [
            (axis.shape, axis.stride) if len(axis.shape) > 1 else (axis.numel(), axis.stride[0] if axis.stride else 1)
            for axis in axes
        ]
        sizes, strides = zip(*pairs)
        if form == "bare" and len(axes) == 1 and len(axes[0].shape) < 2:
            (sizes,), (strides,) = sizes, strides
        layout.__dict__.update(shape=sizes, stride=strides)
    return layout


def held_by(layout):
    return type(layout), sorted(getattr(layout, "__dict__", ()))


@pytest.mark.skipif(STOCK, reason="stock reads the files of releases that have its layouts")
@pytest.mark.parametrize("form", ["axes", *(pytest.param(old, marks=needs_package) for old in OLD_FORMS)])
@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("name", ["root", "slice", "one rank", "flat", "apart"])
def test_files_of_every_release_are_read(form, weights_only, name, monkeypatch):
    mesh = init_device_mesh("cpu", (2, 1, 4, 2), mesh_dim_names=("a", "o", "b", "c"))
    views = {"root": mesh, "slice": mesh["a", "c"], "one rank": mesh["o", "b"]}
    views |= {"flat": mesh["b", "c"]._flatten("bc"), "apart": mesh["a", "c"]._flatten("ac")}
    here = views[name]
    own = {id(one): one._layout for one in (mesh, *views.values())}
    if form == "tensor":
        from torch_overlay.compat.device_mesh import _OldestDeviceMesh
    monkeypatch.setattr(DeviceMesh, "__getstate__", _OldestDeviceMesh.__getstate__ if form == "tensor" else saved_state)
    for one in (mesh, *views.values()) if form != "tensor" else ():
        one._layout = as_saved(one, form)
    file = io.BytesIO()
    torch.save(here, file) if weights_only else pickle.dump(here, file)
    for one in (mesh, *views.values()):
        one._layout = own[id(one)]
    file.seek(0)
    there = torch.load(file, weights_only=True) if weights_only else pickle.load(file)
    assert there == here and hash(there) == hash(here) and there.mesh.tolist() == here.mesh.tolist()
    assert held_by(there._layout) == held_by(here._layout), "in the form that torch's own code here reads"
    assert [group_ranks(there, axis) for axis in range(there.ndim)] == [
        group_ranks(here, axis) for axis in range(here.ndim)
    ]
    assert there._get_root_mesh()["ac"].mesh.tolist() == views["apart"].mesh.tolist()


@needs_package
@pytest.mark.parametrize("name", ["root", "slice", "flat"])
def test_files_of_meshes_that_are_tensors_are_read(name, monkeypatch):
    """As torch itself wrote them before 2.10: of a slice they say no root, so it is one, with the same ranks and
    groups."""
    from torch_overlay.compat.tensor_mesh import as_tensor

    mesh = init_device_mesh("cpu", (2, 4, 2), mesh_dim_names=("a", "b", "c"))
    here = {"root": mesh, "slice": mesh["a", "c"], "flat": mesh["b", "c"]._flatten("bc")}[name]
    theirs = ("_thread_id", "_dim_group_names", "_coordinate_on_dim")
    state = {**as_tensor(here), **{held: getattr(here, held) for held in theirs}}
    monkeypatch.setattr(DeviceMesh, "__getstate__", lambda mesh: state)
    there = pickle.loads(pickle.dumps(here))
    assert there._get_root_mesh() is there and there.mesh.tolist() == here.mesh.tolist()
    assert (there.shape, there.get_coordinate()) == (here.shape, here.get_coordinate())
    assert [group_ranks(there, axis) for axis in range(there.ndim)] == [
        group_ranks(here, axis) for axis in range(here.ndim)
    ]
    assert there[there.mesh_dim_names[:1]].mesh.tolist() == here[here.mesh_dim_names[:1]].mesh.tolist()


@contextlib.contextmanager
def off():
    torch_overlay.disable()
    try:
        yield
    finally:
        torch_overlay.enable()


def built():
    mesh = init_device_mesh("cpu", (2, 4, 2), mesh_dim_names=("a", "b", "c"))
    flat = mesh["a", "b"]._flatten("ab")
    cut = mesh if TENSOR_MESHES else mesh._unflatten(1, (2, 2), ("d", "e"))
    inside = DeviceMesh("cpu", [[1, 5], [9, 13]], mesh_dim_names=("x", "y"))
    return [mesh, mesh["b"], flat, cut, inside, inside["y"]]


def answers(mesh):
    """What a mesh says of where this rank is, in the very types."""
    place = mesh.get_coordinate()
    return type(place), place, mesh._coordinate_on_dim, mesh.get_rank(), mesh.mesh.tolist(), mesh.shape


@needs_package
def test_coordinates_are_what_the_release_gives():
    """A tuple, or a list before 2.11: programs compare them. Also of copies, of meshes from files, and of views of
    meshes that torch made, which before 2.11 don't hold the rank."""
    with off():
        theirs = built()
        expected = [answers(mesh) for mesh in theirs]
        their_slice = answers(theirs[0]["b", "c"])
        owner = _mesh_resources if TENSOR_MESHES else DeviceMesh
        their_parts = owner._get_all_submeshes(theirs[0], "b")
        expected_parts = [answers(mesh) for mesh in their_parts]
    ours = built()
    for meshes in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), theirs):
        assert [answers(mesh) for mesh in meshes] == expected
        assert answers(meshes[0]["b", "c"]) == their_slice
    assert [answers(mesh) for mesh in theirs[0]._get_all_submeshes("b")] == expected_parts


@needs_package
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda mesh: pickle.loads(pickle.dumps(mesh))])
def test_torch_saves_and_copies_meshes_that_were_made_here(copied):
    """After disable(): what a mesh holds for us must not be in the way."""
    ours = built()
    with off():
        for mesh in ours:
            there = copied(mesh)
            assert there == mesh and answers(there) == answers(mesh)
            assert [group.size() for group in mesh.get_all_groups()] == list(mesh.shape)
        names = sorted(vars(ours[0]["a"]))
    assert answers(ours[0]["a"])[1] is not None and names


@needs_package
def test_a_loaded_mesh_that_nobody_asked_anything_is_given_back():
    """By disable(): of itself it isn't a tensor, which torch's meshes are before 2.10."""
    mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("a", "b"))
    loaded = [pickle.loads(pickle.dumps(one)) for one in (mesh, mesh["b"])]
    with off():
        for made, there in zip((mesh, mesh["b"]), loaded, strict=True):
            assert answers(there) == answers(made) and there.get_group("b").size() == 8
            assert answers(copy.deepcopy(there)) == answers(made)


@needs_overlay
def test_a_file_without_a_rank_is_read(monkeypatch):
    """As torch wrote it before 2.11, in a process without a world: what the file says of the coordinates holds until
    a world says more."""
    mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("a", "b"))
    state = mesh.__getstate__()
    del state["_rank"]
    for name in ("_mesh.pickling", "device_mesh"):
        monkeypatch.setattr(f"torch_overlay.distributed.{name}.is_initialized", lambda: False)
    there = object.__new__(DeviceMesh)
    there.__setstate__(state)
    assert tuple(there.get_coordinate()) == (0, 5) and there.mesh.tolist() == mesh.mesh.tolist() and there == mesh
    monkeypatch.undo()
    assert there.get_group("b").size() == 8 and there._rank == 5


@needs_overlay
@pytest.mark.skipif(not TENSOR_MESHES, reason="since 2.10 placements are made otherwise")
def test_files_of_dtensors_go_to_later_releases_and_come_back():
    """A placement says its state, though empty, which later releases make it of; and an order of axes is read."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, _dtensor_spec

    assert Replicate().__reduce_ex__(2)[2] == {}
    mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("a", "b"))
    here = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0), Replicate()], run_check=False)
    here._spec.__dict__["shard_order"] = (_dtensor_spec.ShardOrderEntry(0, (0,)),)  # as they write it
    file = io.BytesIO()
    torch.save(here, file)
    for weights_only in (False, True):
        file.seek(0)
        there = torch.load(file, weights_only=weights_only)
        assert there._spec == here._spec and there.redistribute(placements=[Replicate()] * 2).shape == (8, 4)
