"""Before a loaded view finds the groups that it shares with no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._mesh_group_names import group_names
from ._mesh_state import is_apart, shared_state
from ._universe import current_world, making_private

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def mark_apart(mesh: DeviceMesh) -> None:
    """Give a view whose new axes have groups of their own a token, see `is_apart`."""
    shared = shared_state(mesh)
    if group_names(mesh) is not None and shared.private is None and (making_private.get() or is_apart(mesh)):
        mesh.__dict__["_apart"] = current_world().next_private(shared.rank_map)
