"""Wrong input of every kind: a clear error, stock's words where stock has words, and nothing changed afterwards."""

import contextlib
import enum

import numpy as np
import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mesh_harness import STOCK, fake_world, group_ranks, needs_overlay, quiet
from way import needs_package

WORLD = 12
CLEAR = (ValueError, RuntimeError, KeyError, TypeError, IndexError, NotImplementedError)


@pytest.fixture
def mesh():
    """2 x 2 x 3 with a flattened (a, c), on rank 3 of 12."""
    with fake_world(3, WORLD), quiet():
        made = init_device_mesh("cpu", (2, 2, 3), mesh_dim_names=("a", "b", "c"))
        made["a", "c"]._flatten("ac")
        yield made


def state(mesh: DeviceMesh) -> dict:
    """All that a refused call could have left behind."""
    world, root = distributed_c10d._world, mesh._get_root_mesh()
    return {
        "groups": list(world.pg_map),
        "names": dict(world.pg_names),
        "created": world.group_count,
        "flattened": {name: id(one) for name, one in root._flatten_mapping.items()},
        "registered": sorted(root._pg_registry),
        "mesh": (mesh.mesh.tolist(), mesh._dim_group_names[:], hash(mesh), repr(mesh)),
        "attributes": sorted(vars(mesh)),  # after what is made on request
    }


@contextlib.contextmanager
def changes_nothing(mesh):
    before = state(mesh)
    yield
    assert state(mesh) == before
    assert mesh["a"].mesh.tolist() == [3, 9] and mesh["ac"].mesh.tolist() == [3, 4, 5, 9, 10, 11]


def grid(*sizes, **how):
    return init_device_mesh("cpu", sizes, **how)


def overridden(backends):
    return grid(12, mesh_dim_names=("a",), backend_override=backends)


def given(groups, ranks=None, names=None):
    return DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=names)


# What stock refuses, and its words (found by running 2.13.0 and 2.15.0): the call, the kind, a piece of the message.
STOCK_REFUSES = {
    "unknown axis": (lambda m: m["zz"], KeyError, "Valid mesh_dim_names are .*'a', 'b', 'c', 'ac'"),
    "axes out of order": (lambda m: m["b", "a"], KeyError, "Mesh dim indices should be in ascending order"),
    "an axis twice": (lambda m: m["a", "a"], RuntimeError, "Slicing overlapping dim_names .* is not allowed"),
    "an axis and its flattened one": (lambda m: m["a", "ac"], RuntimeError, "Slicing overlapping dim_names"),
    "flattened out of order": (lambda m: m["ac", "b"], KeyError, "should be in ascending order"),
    "axis of another view": (lambda m: m["b"]["a"], KeyError, r"Valid mesh_dim_names are \['b'"),
    "slice without names": (lambda m: grid(12)["a"], RuntimeError, "Cannot slice a DeviceMesh without mesh_dim_names!"),
    "flatten without names": (lambda m: grid(12)._flatten(), RuntimeError, "Cannot flatten a DeviceMesh without"),
    "flatten to a taken name": (lambda m: m["a", "b"]._flatten("ac"), ValueError, "ac has been created before"),
    "flatten to an axis": (lambda m: m["a", "b"]._flatten("c"), ValueError, "c already exists for submesh of the"),
    "unflatten axis 5": (lambda m: m._unflatten(5, (2, 3), ("x", "y")), ValueError, "dim 5 .* is out of range 3"),
    "unflatten axis -4": (
        lambda m: m._unflatten(-4, (2, 1), ("x", "y")),
        (IndexError, ValueError),
        "3 dims|out of range",
    ),
    "unflatten axis q": (lambda m: m._unflatten("q", (3,), ("x",)), ValueError, "dim q .* is not in"),
    "unflatten, names missing": (lambda m: m._unflatten("c", (3, 1), ("x",)), RuntimeError, "must have same length as"),
    "unflatten to 4": (lambda m: m._unflatten("c", (2, 2), ("x", "y")), ValueError, "is 4, but .* dim=2 has size 3"),
    "unflatten to nothing": (lambda m: m._unflatten("c", (0,), ("x",)), ValueError, r"mesh_sizes=\(0,\) is 0"),
    "submeshes of no axis": (lambda m: m._get_all_submeshes("q"), KeyError, "Mesh dimension 'q' does not exist"),
    "rank 99": (lambda m: DeviceMesh("cpu", [0, 99]), ValueError, "Rank 99 is out of range. Valid ranks are 0 to 11"),
    "rank -1": (lambda m: DeviceMesh("cpu", [-1, 0]), ValueError, "Rank -1 is out of range. Valid ranks are 0 to 11"),
    "too many ranks": (lambda m: DeviceMesh("cpu", torch.arange(16)), RuntimeError, "size 12, but found 16 ranks!"),
    "too many by shape": (lambda m: grid(13), RuntimeError, "Mesh should not be bigger than default world size 12"),
    "no mesh": (lambda m: DeviceMesh("cpu", None), TypeError, "The mesh argument is required"),
    "ragged lists": (lambda m: DeviceMesh("cpu", [[0, 1], [2]]), ValueError, "expected sequence of length 2 at dim 1"),
    "a device with an index": (lambda m: init_device_mesh("cpu:0", (12,)), RuntimeError, "index is not supported"),
    "a name twice": (lambda m: grid(2, 6, mesh_dim_names=("a", "a")), RuntimeError, "mesh_dim_name must be unique"),
    "too few names": (lambda m: grid(2, 6, mesh_dim_names=("a",)), RuntimeError, "should have same length"),
    "override of no axis": (lambda m: overridden({"z": "gloo"}), RuntimeError, "invalid keys in .*: got .'z'."),
    "override by both": (
        lambda m: overridden({"a": "gloo", 0: "fake"}),
        RuntimeError,
        "redundant dim index 0 and name a",
    ),
    "which group": (lambda m: m.get_group(), RuntimeError, "Optional kwarg `mesh_dim` needs to be specified"),
    "which local rank": (lambda m: m.get_local_rank(), RuntimeError, "Optional kwarg `mesh_dim` needs to be specified"),
    "group of no axis": (lambda m: m.get_group("q"), KeyError, "Mesh dimension 'q' does not exist"),
    "group without names": (lambda m: grid(2, 6).get_group("a"), KeyError, "No `mesh_dim_names` found"),
    "group 7": (lambda m: m.get_group(7), IndexError, "out of range"),
    "size 7": (lambda m: m.size(7), IndexError, "out of range"),
    "group 0.5": (lambda m: m.get_group(0.5), AssertionError, "mesh_dim must be an int"),
    "no groups": (lambda m: DeviceMesh.from_group([], "cpu"), ValueError, "Expects at least one ProcessGroup"),
    "groups, no mesh": (lambda m: given(m.get_all_groups()), ValueError, "Must pass mesh if passing multiple"),
    "groups, no names": (
        lambda m: given(m.get_all_groups(), m.mesh),
        ValueError,
        "Must pass mesh_dim_names if passing",
    ),
    "groups, wrong axes": (lambda m: given(m.get_all_groups(), [0, 1], ("a",)), ValueError, "Expects mesh with ndim"),
    "group, wrong ranks": (lambda m: given(m.get_group("a"), [0, 1]), ValueError, r"\[0, 1\] for .* ranks \[3, 9\]"),
    "text": (lambda m: DeviceMesh("cpu", "0,1"), TypeError, "invalid data type 'str'"),
}

# What stock takes, or answers without a sentence or with one about something else: ours says what is wrong.
CLEARER = {
    "unflatten to negatives": (lambda m: m._unflatten("c", (-3, -1), ("x", "y")), "-3|negative|positive"),
    "negative sizes": (lambda m: grid(2, -6), "at least 1.*-6"),
    "size zero": (lambda m: grid(2, 0, 3), "at least 1.*0"),
    "one size zero": (lambda m: grid(0), "at least 1.*0"),
    "float sizes": (lambda m: grid(2.0, 6), "2.0|int"),
    "a bare number for a shape": (lambda m: init_device_mesh("cpu", 12), "12|int"),
    "no ranks": (lambda m: DeviceMesh("cpu", []), "empty|no rank|at least one"),
    "a rank twice": (lambda m: DeviceMesh("cpu", [[0, 1], [1, 2]]), "1"),
    "a rank twice, apart": (lambda m: DeviceMesh("cpu", [[0, 1], [2, 0]]), "0"),
    "half ranks": (lambda m: DeviceMesh("cpu", [0.5, 1.7]), "whole ranks .* got rank 0.5"),
    "a rank of 33 bits": (lambda m: DeviceMesh("cpu", [2**32, 1]), "from 0 to 2147483647, got rank 4294967296"),
    "33 bits in a tensor": (lambda m: DeviceMesh("cpu", torch.tensor([[1, 2**32]])), "got rank 4294967296"),
    "negative, 33 bits": (lambda m: DeviceMesh("cpu", torch.tensor([3, 1 - 2**32])), "got rank -4294967295"),
    "33 bits, no groups": (lambda m: DeviceMesh("cpu", [2**31], _init_backend=False), "got rank 2147483648"),
    "rank 99, no axes": (lambda m: DeviceMesh("cpu", torch.tensor(99)), "Rank 99 is out of range"),
    "negative in a tensor": (lambda m: DeviceMesh("cpu", torch.tensor([-1, 0])), "Rank -1 is out of range"),
    "64 bits unsigned": (lambda m: DeviceMesh("cpu", np.array([2**64 - 1], np.uint64)), "-1|18446744073709551615"),
    "33 bits as a float": (lambda m: DeviceMesh("cpu", [2.0**32, 1.0]), "4294967296"),
    "names missing": (lambda m: DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a",)), "mesh_dim_names|names"),
    "a name that is a list": (lambda m: DeviceMesh("cpu", [[0], [1]], mesh_dim_names=([], "b")), r"hashed, .*got \[\]"),
    "names to spare": (lambda m: DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("a", "b")), "mesh_dim_names|names"),
    "ranks on the meta device": (lambda m: DeviceMesh("cpu", torch.arange(4, device="meta")), "meta"),
    "nothing to concatenate": (lambda m: DeviceMesh._concatenate([]), "empty|at least one|no mesh"),
}


@pytest.mark.parametrize("what", STOCK_REFUSES)
def test_what_stock_refuses_is_refused_in_its_words(mesh, what):
    call, kind, words = STOCK_REFUSES[what]
    extra = {"slice without names", "flatten without names", "group without names"}
    if what in extra:  # these make a good mesh first
        with pytest.raises(kind, match=words):
            call(mesh)
        return
    with changes_nothing(mesh), pytest.raises(kind, match=words):
        call(mesh)


@needs_package  # torch's layouts, upstream's too, assert it without a word
def test_a_flattened_axis_is_not_cut_across_its_axes(mesh):
    with changes_nothing(mesh), pytest.raises(ValueError, match="3:2 doesn't divide 3:1"):
        mesh["ac"]._unflatten(0, (3, 2), ("x", "y"))


@needs_overlay
@pytest.mark.parametrize("what", CLEARER)
def test_what_stock_lets_pass_or_mumbles_is_refused_clearly(mesh, what):
    call, words = CLEARER[what]
    with changes_nothing(mesh), pytest.raises(CLEAR, match=words):
        call(mesh)


@needs_overlay
def test_all_axes_have_names_or_none(mesh):
    """Else a mesh of three axes had two names, and the second one was the third axis's."""
    nameless = grid(3, 4)
    with pytest.raises(ValueError, match="the others need names, too"):
        nameless._unflatten(1, (2, 2), ("x", "y"))
    line = grid(12)
    named = line._unflatten(0, (3, 4), ("x", "y"))
    assert named.mesh_dim_names == ("x", "y")
    with pytest.raises(RuntimeError, match="with and without mesh_dim_names"):
        DeviceMesh._concatenate([named["x"], line])


GRID = torch.arange(12).reshape(3, 4)
TYPES = [torch.tensor([4, 3], dtype=kind) for kind in (torch.int64, torch.int16, torch.uint8, torch.float32)]
VIEWS = [GRID.t(), GRID[:, ::2], GRID[:1].expand(1, 4), GRID[0, 2]]


@pytest.mark.parametrize("ranks", [[4, 5, 3], (4, 5, 3), np.array([4, 5, 3]), range(3, 6), *TYPES, *VIEWS])
def test_ranks_come_in_any_container(mesh, ranks):
    """Lists, tuples, arrays, ranges, tensors of any type and stride: what counts is what it shows."""
    made, shown = DeviceMesh("cpu", ranks), torch.as_tensor(ranks)
    assert made.mesh.tolist() == shown.tolist() and made.shape == tuple(shown.shape)
    assert made.mesh.dtype == torch.int32 and made.mesh.device.type == "cpu"


def test_the_mesh_does_not_follow_a_tensor_that_the_caller_changes_later(mesh):
    """A mesh is a value."""
    ranks = torch.tensor([3, 4], dtype=torch.int)
    made, number = DeviceMesh("cpu", ranks), hash(DeviceMesh("cpu", [3, 4]))
    ranks += 5
    assert hash(made) == number and made == DeviceMesh("cpu", [3, 4])
    assert made.mesh.tolist() == [3, 4] or STOCK


def test_of_two_axes_of_one_name_every_look_up_takes_the_first(mesh):
    """Stock lets a mesh have them."""
    made = DeviceMesh("cpu", torch.arange(12).view(3, 4), mesh_dim_names=("x", "x"))
    assert made["x"].mesh.tolist() == [3, 7, 11] == list(group_ranks(made, "x")) == list(group_ranks(made["x"], 0))


class Axis(enum.Enum):
    DP = "dp"
    TP = "tp"


class Word(str, enum.Enum):
    DP = "dp"
    TP = "tp"


@pytest.mark.parametrize("names", [(0, 1), (Axis.DP, Axis.TP), (Word.DP, Word.TP), (None, "q"), ("", "q")], ids=repr)
def test_a_name_need_not_be_a_string(mesh, names):
    """Stock takes anything that can be hashed; a view is asked for by a tuple, and by the name if that is a string."""
    made = grid(3, 4, mesh_dim_names=names)
    assert made.mesh_dim_names == names and made == grid(3, 4, mesh_dim_names=names)
    assert made[(names[1],)].mesh.tolist() == [0, 1, 2, 3] and made[names] is made
    assert group_ranks(made, 1) == (0, 1, 2, 3) and group_ranks(made[(names[1],)], 0) == (0, 1, 2, 3)
    assert STOCK or made.permute(names[::-1]).shape == (4, 3)
    if isinstance(names[1], str):
        assert made.get_group(names[1]) is made.get_group(1) and made[names[1]] == made[(names[1],)]
    flat = mesh["a", "b"]._flatten(names[1])
    assert flat.mesh_dim_names == (names[1],) and mesh[(names[1],)] == flat


@pytest.mark.parametrize("names", [(0, 1), (Axis.DP, Axis.TP), (None, "q")], ids=repr)
def test_a_name_that_is_no_string_closes_the_way_for_nobody(mesh, names):
    """Meshes over the same groups, made before and after, under names of the other kind."""
    words = tuple(f"{name} as text" for name in names)
    made = [grid(3, 4, mesh_dim_names=chosen) for chosen in (names, words, names)]
    flat = [mesh["a", "b"]._flatten(names[1]), mesh["a", "b"]._flatten("text")]
    views = [one._unflatten(1, (2, 2), chosen) for one, chosen in zip(made, (words, names, words), strict=True)]
    for one in (*made, *flat, *views):
        assert all(isinstance(group.group_desc, str) for group in one.get_all_groups())


@needs_overlay
def test_refused_calls_do_not_close_the_way_for_right_ones(mesh):
    """After every refusal of this file, the right call still works and makes no more groups than it should."""
    for call in [case[0] for case in (*STOCK_REFUSES.values(), *CLEARER.values())]:
        with contextlib.suppress(Exception):
            call(mesh)
    groups = len(distributed_c10d._world.pg_map)
    assert init_device_mesh("cpu", (2, 2, 3), mesh_dim_names=("a", "b", "c")) == mesh
    assert len(distributed_c10d._world.pg_map) == groups + 4, "one an axis, one for the whole"
    assert mesh._unflatten("c", (3, 1), ("x", "y")).shape == (2, 2, 3, 1)
