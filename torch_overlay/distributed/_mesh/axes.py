"""Axes of a mesh by their names: the mesh's own, flattened views of its universe, and
those of views that share groups with no other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from .._mesh_layout import _FlatLayout, _MeshLayout
from .arguments import read_sizes
from .state import axis_names, group_names, is_apart, shared_state, view_of
from .universe import current_world, making_private, universe_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Names = Sequence[str]
T = TypeVar("T")


def _by_name(mesh: DeviceMesh, values: Sequence[T]) -> dict[str, T]:
    """One value an axis, by the axes' names; of two axes of one name, the first, as
    `_get_mesh_dim_by_name` has it."""
    found: dict[str, T] = {}
    # a mesh without names has none
    for name, value in zip(mesh._mesh_dim_names or (), values):
        found.setdefault(name, value)
    return found


def select(mesh: DeviceMesh, names: Names) -> _MeshLayout:
    """The layouts of these axes, in this order: the mesh's own, else the flattened view
    of that name.

    Raises:
        KeyError: a name that neither the mesh nor a flattened view has; lists those
            that would do.
    """
    own = _by_name(mesh, view_of(mesh).layout.axes)
    flattened = shared_state(mesh).flattened
    if not all(name in own or name in flattened for name in names):
        valid = list(dict.fromkeys([*own, *flattened]))
        raise KeyError(
            f"Invalid mesh_dim_names {names} specified. Valid mesh_dim_names are "
            f"{valid}."
        )
    axes: list[_FlatLayout] = [
        own[name] if name in own else view_of(flattened[name]).layout.axes[0]
        for name in names
    ]
    return _MeshLayout(tuple(axes))


def ascending(mesh: DeviceMesh, names: Names) -> _MeshLayout:
    """The layouts of these axes, held to the rule for slices: outer axes before inner
    ones, or the mesh's order.

    Raises:
        KeyError: another order, or a name that there isn't.
        RuntimeError: axes that share ranks.
    """
    layout = select(mesh, names)
    joint = layout.collapse()
    own = mesh._mesh_dim_names or ()
    places = [own.index(name) for name in names if name in own]
    if not joint.check_sorted() and (
        len(places) < len(names) or places != sorted(places)
    ):
        raise KeyError(
            f"Invalid mesh_dim_names {names} specified. Mesh dim indices should be in "
            "ascending order."
        )
    if not joint.check_orthogonal():
        raise RuntimeError(f"Slicing overlapping dim_names {names} is not allowed.")
    return layout


def cut_axis(
    mesh: DeviceMesh, dim: int, sizes: Sequence[int], names: Names
) -> tuple[_MeshLayout, list[str]]:
    """The layouts of the axes that axis ``dim`` becomes (only these), and the names of
    all axes of the cut mesh.

    Raises:
        ValueError: the sizes don't give the axis, a name is taken, or other axes have
            none.
    """
    axis = view_of(mesh).layout.axes[dim]
    if math.prod(sizes) != axis.numel():
        raise ValueError(
            f"The product of mesh_sizes={sizes} is {math.prod(sizes)}, "
            f"but the original dimension at dim={dim} has size {axis.numel()}. "
            f"These must be equal for unflatten to work correctly."
        )
    sizes = read_sizes(sizes)  # two negative ones have a product, too
    if mesh._mesh_dim_names is None and mesh.ndim > 1:
        raise ValueError(
            f"unflatten names the new axes, so the others need names, too, and {mesh} "
            "has none"
        )
    all_names = list(mesh._mesh_dim_names or ())
    all_names[dim : dim + 1] = names
    if len(set(all_names)) != len(all_names):
        raise ValueError(
            f"unflatten needs names that no other axis of the mesh has, got {names}: "
            f"{all_names}"
        )
    return axis.composition(_MeshLayout.from_sizes_strides(sizes)), all_names


def dim_of(mesh: DeviceMesh, dim: int | str) -> int:
    """The number of an axis, given by number or name. Raises ValueError for a name that
    the mesh doesn't have."""
    if not isinstance(dim, str):
        return dim
    own = mesh._mesh_dim_names or ()
    if dim not in own:
        raise ValueError(
            f"No axis {dim!r} in this mesh to unflatten. It has {own or 'no names'}."
        )
    return own.index(dim)


def is_flattened(root: DeviceMesh, name: str, layout: _MeshLayout) -> bool:
    """Whether the root has a flattened view of this name and layout. Raises ValueError
    if the name belongs to an axis of the root or to a flattened view with another
    layout."""
    taken = root._mesh_dim_names or ()
    if name in taken:
        raise ValueError(
            f"{name} already exists for submesh of the {root}. "
            f"The mesh_dim_names of submesh and flattened mesh are {taken}. "
            f"Please specify another valid mesh_dim_name.",
        )
    known = root._flatten_mapping.get(name)
    if known is not None and view_of(known).layout != layout:
        raise ValueError(
            f"Flatten mesh with mesh_dim_name {name} has been created before, "
            f"Please specify another valid mesh_dim_name."
        )
    return known is not None


def select_groups(mesh: DeviceMesh, names: Names) -> list[str] | None:
    """The group name on each of these axes; empty on a rank outside, None where no
    backend was set up."""
    held = group_names(mesh)
    if not held:
        return held
    own = _by_name(mesh, held)
    flattened = shared_state(mesh).flattened
    return [
        own[name] if name in own else flattened[name]._dim_group_names[0]
        for name in names
    ]


def side_by_side(meshes: Sequence[DeviceMesh]) -> _MeshLayout:
    """All axes of several views over one rank map.

    Raises:
        RuntimeError: meshes over different rank maps, axes that share ranks, or names
            or the order of ranks in groups on some axes only.
    """
    if any(view_of(mesh).rank_map != view_of(meshes[0]).rank_map for mesh in meshes):
        raise RuntimeError(
            "Cannot concatenate DeviceMeshes derived from different device meshes"
        )
    if len({mesh._mesh_dim_names is None for mesh in meshes}) > 1:
        raise RuntimeError(
            f"Cannot concatenate meshes with and without mesh_dim_names: {meshes}"
        )
    if len({mesh._preserve_rank_order for mesh in meshes}) > 1:
        raise RuntimeError(
            f"Cannot concatenate meshes with and without preserve_rank_order: {meshes}"
        )
    layout = _MeshLayout(
        tuple(axis for mesh in meshes for axis in view_of(mesh).layout.axes)
    )
    if not layout.collapse().check_orthogonal():
        raise RuntimeError(f"Cannot concatenate overlapping meshes: {meshes}")
    return layout


def start_at(
    mesh: DeviceMesh, shown: Names, axes: _MeshLayout, at: Mapping[str, int]
) -> int:
    """The index where the axes in ``shown``, with these layouts, start if the others
    sit at the coordinates ``at``, else at this rank's own.

    Raises:
        KeyError: a name in ``at`` that the mesh doesn't have.
        ValueError: a coordinate outside its axis, or given for an axis that is shown,
            be it inside a flattened view; an axis shown twice, be it once inside a
            flattened view.
    """
    own = _by_name(mesh, view_of(mesh).layout.axes)
    unknown = [name for name in at if name not in own]
    if unknown:
        raise KeyError(
            f"No axis {unknown[0]!r} in this mesh to fix a coordinate on. Its axes "
            f"are {list(own)}."
        )
    if len(set(shown)) < len(shown) or not axes.collapse().check_orthogonal():
        raise ValueError(
            "A view needs axes that have no ranks in common, each once, got "
            f"{list(shown)}."
        )
    for name in at:
        if (
            name in shown
            or not _MeshLayout((*axes.axes, own[name])).collapse().check_orthogonal()
        ):
            raise ValueError(
                f"Axis {name!r} is shown, so it can't sit at one coordinate: give "
                f"{list(shown)} or `at`."
            )
    index = view_of(mesh).rank_map.index(mesh._rank) or 0  # 0 on a rank outside
    start = index
    for name, coordinate in at.items():
        axis = own[name]
        if not 0 <= coordinate < axis.numel():
            raise ValueError(
                f"Axis {name!r} has coordinates 0 to {axis.numel() - 1}, got "
                f"{coordinate}."
            )
        start += axis(coordinate) - axis(axis.coordinate(index))
    return axes.origin(start)


def mark_apart(mesh: DeviceMesh) -> None:
    """Give a view whose new axes have groups of their own a token, see `is_apart`, and
    note it of these groups."""
    shared, names = shared_state(mesh), group_names(mesh)
    if (
        names is not None
        and shared.private is None
        and (making_private.get() or is_apart(mesh))
    ):
        mesh.__dict__["_apart"] = whose = current_world().next_private(shared.rank_map)
        for entry in list(universe_of(shared).table.entries.values()):
            if entry.apart == "" and entry.group_name in names:
                entry.apart = whose


def mark_slice(view: DeviceMesh, mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Give a slice the token of each axis that it shows: of the mesh's own, else of the
    flattened view of that name."""
    own, flattened = mesh._mesh_dim_names or (), shared_state(mesh).flattened
    _mark_axes(
        view, [_token(mesh if name in own else flattened[name], name) for name in names]
    )
    return view


def mark_beside(mesh: DeviceMesh, parts: Sequence[DeviceMesh]) -> None:
    """Give a view of several side by side the token of each axis."""
    names = [
        axis_names(part._mesh_dim_names, len(view_of(part).layout.axes))
        for part in parts
    ]
    _mark_axes(
        mesh,
        [
            _token(part, name)
            for part, held in zip(parts, names, strict=True)
            for name in held
        ],
    )


def _mark_axes(mesh: DeviceMesh, tokens: Sequence[str | None]) -> None:
    """One token if all axes have the same, nothing if none has any; else pairs of name
    and token, the same in any order of the axes."""
    mesh.__dict__.pop("_apart", None)
    if len(set(tokens)) > 1:
        names = axis_names(mesh._mesh_dim_names, len(tokens))
        mesh.__dict__["_apart"] = tuple(
            sorted(zip(names, tokens), key=lambda pair: pair[0])
        )
    elif tokens and tokens[0] is not None:
        mesh.__dict__["_apart"] = tokens[0]


def _token(mesh: DeviceMesh, name: str) -> str | None:
    """Of the axis of this name; of two of one name, of the first."""
    held = mesh.__dict__.get("_apart")
    return dict(reversed(held)).get(str(name)) if isinstance(held, tuple) else held
