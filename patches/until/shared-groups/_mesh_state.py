"""Before groups are shared: a mesh that holds only what torch stores has no universe to join."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._rank_map import RankMap
from ._shared_state import SharedState
from ._torch_layout import from_torch
from ._view import View

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def _adopt(mesh: DeviceMesh) -> dict[str, Any]:
    """Read the state off a mesh that holds only what torch stores; costs as much as the rank map is long, once."""
    held = mesh.__dict__
    root = held.get("_root_mesh")
    if root is None or root is mesh:
        shared = SharedState(RankMap(held["_flatten_rank_map"]))
        shared.flattened = held["_flatten_mapping"]
        shared.registry = held["_pg_registry"]
    else:
        shared = shared_state(root)
        shared.registry.update(held["_pg_registry"])
    held["_view"] = View(shared.rank_map, from_torch(held["_layout"]))
    held["_shared_state"] = shared
    return held
