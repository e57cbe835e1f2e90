"""Random sequences of mesh operations agree with plain lists of ranks, on every rank."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from mesh_harness import STOCK, fake_world, group_ranks, make_root, permuted, quiet
from torch_overlay.distributed._torch import from_torch
from twins import MeshTwin

MOST_RANKS = 24
REFUSALS = (ValueError, RuntimeError, KeyError, AssertionError) if STOCK else (ValueError, RuntimeError, KeyError)

MESH_VERBS = {
    "slice": lambda views, i, names: views[i][names],
    "flatten": lambda views, i, name: views[i]._flatten(name),
    "unflatten": lambda views, i, axis, sizes, names: views[i]._unflatten(axis, sizes, names),
    "concatenate": lambda views, *chosen: DeviceMesh._concatenate([views[i] for i in chosen]),
    "permute": lambda views, i, names: permuted(views[i], names),
    "beside": lambda views, i, names: DeviceMesh._concatenate([views[i][name] for name in names]),
    "by name": lambda views, names, _: views[0][names],
}


def twin_of(views: list[MeshTwin], verb: str, *how) -> MeshTwin | None:
    """What a step gives on lists of ranks; None where it must be refused: no mesh, or axes that don't ascend."""
    if verb == "slice":
        i, names = how
        twin = views[i].slice(names)
        in_its_order = names == tuple(sorted(names, key=views[i].names.index))
        return twin if in_its_order or twin.ascends() else None
    if verb == "flatten":
        return views[how[0]].flatten(how[1])
    if verb == "unflatten":
        twin = views[how[0]].unflatten(*how[1:])
        return twin if twin.is_grid() else None
    if verb in ("permute", "beside"):
        return views[how[0]].slice(how[1])
    if verb == "by name":
        twin = MeshTwin.concatenate([views[i] if i else views[0].slice((name,)) for name, i in zip(*how, strict=True)])
        return twin if twin.ascends() and not twin.overlaps() else None
    twin = MeshTwin.concatenate([views[i] for i in how])
    return None if twin.overlaps() else twin


def divisors(number: int) -> list[int]:
    return [i for i in range(1, number + 1) if number % i == 0]


@st.composite
def steps(draw, views: list[MeshTwin], named: dict[str, int], fresh):
    """One step that fits the views so far; ``named`` says which views are flattened ones of which name."""
    i = draw(st.integers(0, len(views) - 1))
    view = views[i]
    verb = draw(st.sampled_from(["slice", "flatten", "unflatten", "concatenate", "permute", "beside", "by name"]))
    if verb == "slice":
        names = draw(st.lists(st.sampled_from(view.names), min_size=1, unique=True))
        if draw(st.booleans()):
            names.sort(key=view.names.index)
        return verb, i, tuple(names)
    if verb == "flatten":
        return verb, i, next(fresh)
    if verb == "unflatten":
        axis = draw(st.integers(0, len(view.sizes) - 1))
        first = draw(st.sampled_from(divisors(view.sizes[axis])))
        second = draw(st.sampled_from(divisors(view.sizes[axis] // first)))
        sizes = (first, second, view.sizes[axis] // first // second)
        sizes = sizes if second > 1 else (first, sizes[-1])
        return verb, i, axis, sizes, tuple(next(fresh) for _ in sizes)
    if verb in ("permute", "beside"):
        return verb, i, tuple(draw(st.permutations(view.names)))
    if verb == "by name" and named:
        flat = draw(st.sampled_from(sorted(named)))
        axis = draw(st.sampled_from(views[0].names))
        names = draw(st.sampled_from([(flat,), (axis, flat), (flat, axis)]))
        return verb, names, tuple(named.get(name, 0) for name in names)
    chosen = draw(st.lists(st.integers(0, len(views) - 1), min_size=2, max_size=3, unique=True)) if views[1:] else [0]
    while math.prod(math.prod(views[i].sizes) for i in chosen) > 2 * MOST_RANKS:
        chosen.pop()
    return "concatenate", *chosen


@st.composite
def programs(draw):
    """(world size, root twin, steps): the root's rank map is the identity or not, and may leave ranks outside."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5).filter(lambda s: 4 <= math.prod(s) <= MOST_RANKS))
    outside = 0 if STOCK else draw(st.integers(0, 2))
    world = math.prod(sizes) + outside
    ranks = draw(st.permutations(range(world))) if draw(st.booleans()) else range(world)
    fresh = map("x{}".format, itertools.count())
    root = MeshTwin.of(list(ranks)[: math.prod(sizes)], sizes, [next(fresh) for _ in sizes])
    views, named, program = [root], {}, []
    for _ in range(draw(st.integers(2, 8))):
        step = draw(steps(views, named, fresh))
        twin = twin_of(views, *step)
        if STOCK and step[0] == "slice" and twin is not None and not twin.ascends():
            continue  # in its own order: refused before the stack's patch of views, and not after
        unique = twin is None or len(set(twin.names)) == len(twin.names)
        if unique and (twin is None or len(twin.tiles[0]) <= MOST_RANKS):
            program.append((step, twin))
            if twin is not None:
                if step[0] == "flatten":
                    named[step[2]] = len(views)
                views.append(twin)
    return world, root, program


def check(mesh: DeviceMesh, twin: MeshTwin, rank: int) -> None:
    """One mesh on one rank against its twin."""
    assert (mesh.mesh_dim_names, mesh.shape, mesh.ndim) == (twin.names, twin.sizes, len(twin.sizes))
    assert mesh.size() == math.prod(twin.sizes) and [mesh.size(i) for i in range(mesh.ndim)] == list(twin.sizes)
    place = mesh.get_coordinate()
    assert (place and tuple(place)) == twin.coordinate(rank)
    if rank not in twin.root:
        assert tuple(mesh.mesh.flatten().tolist()) in twin.tiles
        return
    assert mesh.mesh.tolist() == twin.nested(rank)
    if not STOCK:
        check_shared(mesh)
    for axis in range(mesh.ndim):
        line, group = twin.line(rank, axis), group_ranks(mesh, axis)
        assert sorted(group) == sorted(line)
        if not STOCK:
            assert group == line, "a group has the mesh's order"
            assert mesh.get_local_rank(axis) == twin.coordinate(rank)[axis]


def check_shared(mesh: DeviceMesh) -> None:
    """Its tensor is a view of the one that the universe shares, unless an axis steps in more than one way."""
    shown, shared = mesh.mesh, mesh._get_root_mesh()._rank_map
    assert (shown.dtype, shown.device.type, shown.shape) == (torch.int32, "cpu", mesh.shape)
    if all(len(axis.stride) <= 1 for axis in from_torch(mesh._layout).axes):
        assert shown.untyped_storage().data_ptr() == shared.untyped_storage().data_ptr()
    assert mesh._rank_map is shared


def run(program, root: MeshTwin, rank: int) -> None:
    """All steps of a program on one rank, each view checked, then all views against each other."""
    meshes, twins = [make_root(root.root, root.sizes, root.names)], [root]
    for (verb, *how), twin in program:
        if twin is None:
            with pytest.raises(REFUSALS):
                MESH_VERBS[verb](meshes, *how)
        else:
            meshes.append(MESH_VERBS[verb](meshes, *how))
            twins.append(twin)
    for mesh, twin in zip(meshes, twins, strict=True):
        check(mesh, twin, rank)
    for (one, its), (other, others) in itertools.combinations(zip(meshes, twins, strict=True), 2):
        assert (one == other) == (its == others)
        if its == others:
            assert hash(one) == hash(other)


@settings(max_examples=2 * settings.default.max_examples)
@given(programs())
def test_any_sequence_agrees_with_lists_of_ranks(drawn):
    """Slicing, flattening, unflattening, concatenating, permuting and look-up by name, from any root."""
    world, root, program = drawn
    for rank in range(world):
        with fake_world(rank, world), quiet():
            run(program, root, rank)


@settings(max_examples=settings.default.max_examples // 2)
@given(programs())
def test_submeshes_at_any_coordinate_agree_with_lists_of_ranks(drawn):
    """Every copy of an axis, and (ours) the axis as it is at each coordinate of the others."""
    world, root, _ = drawn
    rank = root.root[0]
    with fake_world(rank, world), quiet():
        mesh = make_root(root.root, root.sizes, root.names)
        for axis, name in enumerate(root.names):
            copies = root.slice((name,)).tiles
            submeshes = mesh._get_all_submeshes(name)
            assert {tuple(one.mesh.tolist()) for one in submeshes} == set(copies) and len(submeshes) == len(set(copies))
            assert [bool(one._dim_group_names) for one in submeshes] == [rank in one.mesh.tolist() for one in submeshes]
            others = root.names[:axis] + root.names[axis + 1 :]
            for at in [] if STOCK else root.coordinates():
                where = dict(zip(root.names, at, strict=True))
                one = mesh.submesh_at(name, at={other: where[other] for other in others})
                assert tuple(one.mesh.tolist()) == root.slice((name,)).tile(root.at(rank, at))
                assert (one.mesh_dim_names, one.shape) == ((name,), (root.sizes[axis],))
                if rank in one.mesh.tolist():
                    assert group_ranks(one, 0) == root.line(rank, axis)
