"""What releases do each in their own way: slices that old ones refuse, and files that go from one to another."""

import io
import pickle

import pytest
import torch
import torch.distributed.tensor  # weights_only asks for it
from torch.distributed import _mesh_layout
from torch.distributed.device_mesh import init_device_mesh

from mesh_harness import STOCK, fake_world, group_ranks, needs_overlay
from torch_overlay.distributed._mesh_state import view_of


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


@pytest.mark.skipif(STOCK, reason="stock reads the files of releases that have its layouts")
@pytest.mark.parametrize("form", ["axes", "nested", "bare"])
@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("name", ["root", "slice", "one rank", "flat", "apart"])
def test_files_of_every_release_are_read(form, weights_only, name):
    mesh = init_device_mesh("cpu", (2, 1, 4, 2), mesh_dim_names=("a", "o", "b", "c"))
    views = {"root": mesh, "slice": mesh["a", "c"], "one rank": mesh["o", "b"]}
    views |= {"flat": mesh["b", "c"]._flatten("bc"), "apart": mesh["a", "c"]._flatten("ac")}
    here = views[name]
    own = {id(one): one._layout for one in (mesh, *views.values())}
    for one in (mesh, *views.values()):
        one._layout = as_saved(one, form)
    file = io.BytesIO()
    torch.save(here, file) if weights_only else pickle.dump(here, file)
    for one in (mesh, *views.values()):
        one._layout = own[id(one)]
    file.seek(0)
    there = torch.load(file, weights_only=True) if weights_only else pickle.load(file)
    assert there == here and hash(there) == hash(here) and there.mesh.tolist() == here.mesh.tolist()
    assert vars(there._layout).keys() == vars(here._layout).keys(), "in the form that torch's own code here reads"
    assert [group_ranks(there, axis) for axis in range(there.ndim)] == [
        group_ranks(here, axis) for axis in range(here.ndim)
    ]
    assert there._get_root_mesh()["ac"].mesh.tolist() == views["apart"].mesh.tolist()
