"""Before groups are shared: a mesh that holds only what torch stores has no universe to join."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._rank_map import RankMap
from ._shared_state import SharedState
from ._torch_layout import from_torch
from ._view import View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from ._mesh_layout import _MeshLayout


def _adopt(mesh: DeviceMesh) -> dict[str, Any]:
    """Read the state off a mesh that holds only what DeviceMesh stores; costs as much as the rank map is long, once."""
    held = mesh.__dict__
    root = held.get("_root_mesh")
    if root is None or root is mesh:
        # A subclass that makes its own mesh may set less than DeviceMesh does.
        ranks = held["_flatten_rank_map"] if "_flatten_rank_map" in held else held["_rank_map"].tolist()
        shared = SharedState(RankMap(ranks))
        shared.flattened = held.setdefault("_flatten_mapping", {})
        shared.registry = held.setdefault("_pg_registry", {})
    else:
        shared = shared_state(root)
        shared.registry.update(held.get("_pg_registry", {}))
    held["_view"] = View(shared.rank_map, from_torch(held["_layout"]))
    held["_shared_state"] = shared
    return held


is_apart = ...
axis_names = ...


def make_window(
    parent: DeviceMesh, layout: _MeshLayout, start: int, names: Sequence[str] | None, groups: Sequence[str] | None
) -> DeviceMesh:
    """The copy of ``layout`` at index ``start``, as a root of its own."""
    view = view_of(parent).window(layout, start)
    shared = SharedState(view.rank_map)
    mesh = _blank(parent, None, names)
    put_state(mesh, view, shared)
    mesh._flatten_mapping = shared.flattened
    mesh._pg_registry = shared.registry
    for name in groups or ():
        if name in shared_state(parent).registry:
            shared.registry[name] = shared_state(parent).registry[name]
    return _finish(mesh, parent, groups)
