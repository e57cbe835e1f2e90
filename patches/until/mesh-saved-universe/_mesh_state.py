"""Before pickles say of which root mesh they are: a mesh that holds only what torch stores has no universe to join."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._torch_layout import from_torch
from ._view import View

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

saved_universe = ...


def _read_state(mesh: DeviceMesh) -> None:
    held = mesh.__dict__
    root = getattr(mesh, "_root_mesh", None)
    registry = held.setdefault("_pg_registry", {})
    theirs = None if root is None or root is mesh else shared_state(root)
    rank_map = theirs.rank_map if theirs is not None and _holds_ranks_of(mesh, root) else stored_ranks(held)
    shared = state_over(rank_map, theirs)
    if theirs is None:
        shared.flattened = held.setdefault("_flatten_mapping", {})
        shared.registry = registry
    else:
        shared.registry.update(registry)
    held["_view"] = View(shared.rank_map, from_torch(mesh._layout))
    held["_shared_state"] = shared
