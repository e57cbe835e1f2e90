"""What releases do each in their own way: slices that old ones refuse, and files that go from one to another."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
import torch.distributed.tensor  # weights_only asks for it
from torch.distributed import _mesh_layout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_overlay
from mesh_harness import STOCK, fake_world, group_ranks, needs_overlay
from torch_overlay.distributed._mesh.pickling import saved_state
from torch_overlay.distributed._mesh.state import view_of
from way import needs_package

# How releases before 2.13 wrote layouts; a torch that carries the stack reads what it wrote.
OLD_FORMS = ("nested", "bare")


@pytest.fixture(autouse=True)
def world():
    """Rank 5 of 16."""
    with fake_world(5, 16):
        yield


@needs_overlay  # 2.11 and 2.12 refuse these
@pytest.mark.parametrize(
    ("flattened", "asked", "ranks"),
    [
        (("o",), ("f", "c"), [[5, 7]]),
        (("a", "o", "b"), ("f", "c"), [[1, 3], [5, 7], [9, 11], [13, 15]]),
        (("a", "c"), ("f",), [5, 7, 13, 15]),
        (("a", "o", "c"), ("f", "d"), [[4, 5], [6, 7], [12, 13], [14, 15]]),
        (("b", "d"), ("a", "f"), [[0, 1, 4, 5], [8, 9, 12, 13]]),
    ],
)
def test_slices_hold_flattened_views_of_any_axes(flattened, asked, ranks):
    """Of one rank, and of axes that don't lie side by side."""
    mesh = init_device_mesh("cpu", (2, 1, 2, 2, 2), mesh_dim_names=("a", "o", "b", "c", "d"))
    mesh[flattened]._flatten("f")
    assert mesh[asked].mesh.tolist() == ranks


@needs_overlay
def test_a_flattened_view_may_have_a_letter_of_another_s_name():
    """Names are compared whole. Torch once looked for one name in the text of all."""
    mesh = init_device_mesh("cpu", (2, 4, 2), mesh_dim_names=("a", "b", "c"))
    first, second = mesh["a", "b"]._flatten("xy"), mesh["b", "c"]._flatten("x")
    assert (first.size(), second.size()) == (8, 8) and mesh["x"] == second != first


def as_saved(mesh, form):
    """Its layout as a file of a release holds it: a list of axes since 2.13, nested tuples before."""
    axes = view_of(mesh).layout.axes
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
    monkeypatch.setattr(DeviceMesh, "__getstate__", saved_state)
    for one in (mesh, *views.values()):
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
    cut = mesh._unflatten(1, (2, 2), ("d", "e"))
    inside = DeviceMesh("cpu", [[1, 5], [9, 13]], mesh_dim_names=("x", "y"))
    return [mesh, mesh["b"], flat, cut, inside, inside["y"]]


def answers(mesh):
    """What a mesh says of where this rank is, in the very types."""
    place = mesh.get_coordinate()
    return type(place), place, mesh._coordinate_on_dim, mesh.get_rank(), mesh.mesh.tolist(), mesh.shape


@needs_package
def test_coordinates_are_what_the_release_gives():
    """In the very type: programs compare them. Also of copies, of meshes from files, and of views of meshes that torch
    made."""
    with off():
        theirs = built()
        expected = [answers(mesh) for mesh in theirs]
        their_slice = answers(theirs[0]["b", "c"])
        their_parts = DeviceMesh._get_all_submeshes(theirs[0], "b")
        expected_parts = [answers(mesh) for mesh in their_parts]
    ours = built()
    for meshes in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), theirs):
        assert [answers(mesh) for mesh in meshes] == expected
        assert answers(meshes[0]["b", "c"]) == their_slice
    assert [answers(mesh) for mesh in theirs[0]._get_all_submeshes("b")] == expected_parts


@needs_package
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda mesh: pickle.loads(pickle.dumps(mesh))])
def test_torch_saves_and_copies_meshes_that_were_made_here(copied):
    """After disable(): of what a mesh holds for us, which must not be in the way, only where it was made stays."""
    ours = built()
    with torch_overlay.private_groups():
        ours.append(ours[0]._unflatten(2, (2, 1), ("p", "q")))
    with off():
        for mesh in ours:
            kept = {"_universe", "_preserve_rank_order", "_hash"}  # torch 2.15 has the second, 2.11 the last
            assert {*vars(mesh)} - {*vars(built()[0])} <= kept
            there = copied(mesh)
            assert there == mesh and answers(there) == answers(mesh)
            assert [group.size() for group in mesh.get_all_groups()] == list(mesh.shape)
    assert answers(ours[0]["a"])[1] is not None


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
