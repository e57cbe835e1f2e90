"""Axes of a mesh by their names: which layout a slice, an unflattened or a concatenated
mesh has, and which of its axes have groups that no other view shares.

Start at `select`. A name means an axis of the mesh, or else a flattened view of its
universe. The functions `mark_*` at the end copy the tokens of `is_apart` from axes to
the views that show them.
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
    """Values by axis name; if two axes have one name, the first counts."""
    value_of: dict[str, T] = {}
    # No strict: a mesh without names has values and no names.
    for name, value in zip(mesh._mesh_dim_names or (), values):
        value_of.setdefault(name, value)
    return value_of


def select(mesh: DeviceMesh, names: Names) -> _MeshLayout:
    """The layouts of the axes of these names, in this order; also of flattened
    views."""
    axis_of = _by_name(mesh, view_of(mesh).layout.axes)
    flattened = shared_state(mesh).flattened
    if not all(name in axis_of or name in flattened for name in names):
        valid = list(dict.fromkeys([*axis_of, *flattened]))
        raise KeyError(
            f"Invalid mesh_dim_names {names} specified. Valid mesh_dim_names are "
            f"{valid}."
        )
    axes: list[_FlatLayout] = [
        axis_of[name] if name in axis_of else view_of(flattened[name]).layout.axes[0]
        for name in names
    ]
    return _MeshLayout(tuple(axes))


def ascending(mesh: DeviceMesh, names: Names) -> _MeshLayout:
    """`select` for a slice, whose names must go from outer to inner or as in the
    mesh."""
    layout = select(mesh, names)
    joint = layout.collapse()
    mesh_names = mesh._mesh_dim_names or ()
    # Both rules are needed. A permuted mesh has its own order, in which strides needn't
    # descend; a flattened view has no position in the mesh, only strides.
    positions = [mesh_names.index(name) for name in names if name in mesh_names]
    if not joint.check_sorted() and (
        len(positions) < len(names) or positions != sorted(positions)
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
    """Unflatten one axis. Returns the new axes alone, and the names of all axes."""
    axis = view_of(mesh).layout.axes[dim]
    if math.prod(sizes) != axis.numel():
        raise ValueError(
            f"The product of mesh_sizes={sizes} is {math.prod(sizes)}, "
            f"but the original dimension at dim={dim} has size {axis.numel()}. "
            f"These must be equal for unflatten to work correctly."
        )
    sizes = read_sizes(sizes)  # (-2, -4) has the right product, too
    if mesh._mesh_dim_names is None and mesh.ndim > 1:
        raise ValueError(
            f"unflatten names the new axes, so the others need names, too, and {mesh} "
            "has none"
        )
    # The names of the whole mesh: a new name may equal that of the axis it replaces.
    all_names = list(mesh._mesh_dim_names or ())
    all_names[dim : dim + 1] = names
    if len(set(all_names)) != len(all_names):
        raise ValueError(
            f"unflatten needs names that no other axis of the mesh has, got {names}: "
            f"{all_names}"
        )
    return axis.composition(_MeshLayout.from_sizes_strides(sizes)), all_names


def dim_of(mesh: DeviceMesh, dim: int | str) -> int:
    """The number of an axis, by number (returned unchecked) or name."""
    if not isinstance(dim, str):
        return dim
    mesh_names = mesh._mesh_dim_names or ()
    if dim not in mesh_names:
        raise ValueError(
            f"No axis {dim!r} in this mesh to unflatten. It has "
            f"{mesh_names or 'no names'}."
        )
    return mesh_names.index(dim)


def is_flattened(root: DeviceMesh, name: str, layout: _MeshLayout) -> bool:
    """True if the root has a flattened view of this name and layout."""
    root_names = root._mesh_dim_names or ()
    if name in root_names:
        raise ValueError(
            f"{name} already exists for submesh of the {root}. "
            f"The mesh_dim_names of submesh and flattened mesh are {root_names}. "
            f"Please specify another valid mesh_dim_name.",
        )
    flattened = root._flatten_mapping.get(name)
    if flattened is not None and view_of(flattened).layout != layout:
        raise ValueError(
            f"Flatten mesh with mesh_dim_name {name} has been created before, "
            f"Please specify another valid mesh_dim_name."
        )
    return flattened is not None


def select_groups(mesh: DeviceMesh, names: Names) -> list[str] | None:
    """The name of this rank's group on each of these axes, found as by `select`; [] on
    a rank outside, None where no backend was set up. Call `select` first: it reports an
    unknown name, which isn't noticed here where there are no groups."""
    own_groups = group_names(mesh)
    # Also for an unknown name, which `select` reports. [] and None mean different
    # things.
    if not own_groups:
        return own_groups
    group_of = _by_name(mesh, own_groups)
    flattened = shared_state(mesh).flattened
    return [
        group_of[name] if name in group_of else flattened[name]._dim_group_names[0]
        for name in names
    ]


def side_by_side(meshes: Sequence[DeviceMesh]) -> _MeshLayout:
    """The layout with all axes of several views over one rank map."""
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
    """The index at which a copy of the axes starts, the others at given coordinates."""
    axis_of = _by_name(mesh, view_of(mesh).layout.axes)
    unknown = [name for name in at if name not in axis_of]
    if unknown:
        raise KeyError(
            f"No axis {unknown[0]!r} in this mesh to fix a coordinate on. Its axes "
            f"are {list(axis_of)}."
        )
    if len(set(shown)) < len(shown) or not axes.collapse().check_orthogonal():
        raise ValueError(
            "A view needs axes that have no ranks in common, each once, got "
            f"{list(shown)}."
        )
    for name in at:
        if (
            name in shown
            or not _MeshLayout((*axes.axes, axis_of[name]))
            .collapse()
            .check_orthogonal()
        ):
            raise ValueError(
                f"Axis {name!r} is shown, so it can't sit at one coordinate: give "
                f"{list(shown)} or `at`."
            )
    # A rank outside the mesh has no index, and starts from the first copy.
    index = view_of(mesh).rank_map.index(mesh._rank) or 0
    start = index
    for name, coordinate in at.items():
        # Move along this axis from the own coordinate to the given one. Other axes
        # stay, so the order of `at` doesn't matter.
        axis = axis_of[name]
        if not 0 <= coordinate < axis.numel():
            raise ValueError(
                f"Axis {name!r} has coordinates 0 to {axis.numel() - 1}, got "
                f"{coordinate}."
            )
        start += axis(coordinate) - axis(axis.coordinate(index))
    return axes.origin(start)


def mark_apart(mesh: DeviceMesh) -> None:
    """Give a view a new token if its new axes have groups of their own, see `is_apart`.
    Call it right after the groups were made, inside the same block of
    `private_groups`."""
    shared, names = shared_state(mesh), group_names(mesh)
    if (
        names is not None
        and shared.private is None
        and (making_private.get() or is_apart(mesh))
    ):
        token = current_world().next_private(shared.rank_map)
        mesh.__dict__["_apart"] = token
        for entry in list(universe_of(shared).table.entries.values()):
            if entry.apart == "" and entry.group_name in names:
                entry.apart = token


def mark_slice(view: DeviceMesh, mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Copy the private-group tokens of the selected axes to a slice, and return it."""
    mesh_names, flattened = mesh._mesh_dim_names or (), shared_state(mesh).flattened
    _store_tokens(
        view,
        [
            _token_of_axis(mesh if name in mesh_names else flattened[name], name)
            for name in names
        ],
    )
    return view


def mark_beside(mesh: DeviceMesh, parts: Sequence[DeviceMesh]) -> None:
    """Give `mesh`, the concatenation of `parts`, the private-group tokens of their
    axes."""
    names_of_parts = [
        axis_names(part._mesh_dim_names, len(view_of(part).layout.axes))
        for part in parts
    ]
    _store_tokens(
        mesh,
        [
            _token_of_axis(part, name)
            for part, part_names in zip(parts, names_of_parts, strict=True)
            for name in part_names
        ],
    )


def _store_tokens(mesh: DeviceMesh, tokens: Sequence[str | None]) -> None:
    """Store the tokens of the axes in place of former ones: one if all are the same,
    pairs of axis name and token if not, nothing if no axis has one."""
    mesh.__dict__.pop("_apart", None)
    if len(set(tokens)) > 1:
        names = axis_names(mesh._mesh_dim_names, len(tokens))
        # Sorted, so that the tokens don't depend on the order in which axes were
        # selected.
        mesh.__dict__["_apart"] = tuple(
            sorted(zip(names, tokens), key=lambda pair: pair[0])
        )
    elif tokens and tokens[0] is not None:
        mesh.__dict__["_apart"] = tokens[0]


def _token_of_axis(mesh: DeviceMesh, name: str) -> str | None:
    tokens = mesh.__dict__.get("_apart")
    return (
        dict(reversed(tokens)).get(str(name)) if isinstance(tokens, tuple) else tokens
    )
