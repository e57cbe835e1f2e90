"""Views that share groups with no other, and views of these."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._mesh_group_names import group_names
from ._mesh_state import axis_names, is_apart, shared_state, view_of
from ._universe import current_world, making_private, universe_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh


def mark_apart(mesh: DeviceMesh) -> None:
    """Give a view whose new axes have groups of their own a token, see `is_apart`, and note it of these groups."""
    shared, names = shared_state(mesh), group_names(mesh)
    if names is not None and shared.private is None and (making_private.get() or is_apart(mesh)):
        mesh.__dict__["_apart"] = whose = current_world().next_private(shared.rank_map)
        for entry in list(universe_of(shared).table.entries.values()):
            if entry.apart == "" and entry.group_name in names:
                entry.apart = whose


def mark_slice(view: DeviceMesh, mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Give a slice the token of each axis that it shows: of the mesh's own, else of the flattened view of that name."""
    own, flattened = mesh._mesh_dim_names or (), shared_state(mesh).flattened
    _mark_axes(view, [_token(mesh if name in own else flattened[name], name) for name in names])
    return view


def mark_beside(mesh: DeviceMesh, parts: Sequence[DeviceMesh]) -> None:
    """Give a view of several side by side the token of each axis."""
    names = [axis_names(part._mesh_dim_names, len(view_of(part).layout.axes)) for part in parts]
    _mark_axes(mesh, [_token(part, name) for part, held in zip(parts, names, strict=True) for name in held])


def _mark_axes(mesh: DeviceMesh, tokens: Sequence[str | None]) -> None:
    """One token if all axes have the same, nothing if none has any; else pairs of name and token, the same in any order
    of the axes."""
    mesh.__dict__.pop("_apart", None)
    if len(set(tokens)) > 1:
        names = axis_names(mesh._mesh_dim_names, len(tokens))
        mesh.__dict__["_apart"] = tuple(sorted(zip(names, tokens), key=lambda pair: pair[0]))
    elif tokens and tokens[0] is not None:
        mesh.__dict__["_apart"] = tokens[0]


def _token(mesh: DeviceMesh, name: str) -> str | None:
    """Of the axis of this name; of two of one name, of the first."""
    held = mesh.__dict__.get("_apart")
    return dict(reversed(held)).get(str(name)) if isinstance(held, tuple) else held
