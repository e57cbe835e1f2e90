"""Before ranks are made on request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._shared_state import SharedState
from ._view import View

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def join_state(mesh: DeviceMesh, view: View, root: DeviceMesh | None) -> SharedState:
    """Give a new mesh over these ranks its state, that of its root if it can be."""
    shared = state_over(view.rank_map, None if root is None else shared_state(root))
    put_state(mesh, View(shared.rank_map, view.layout), shared)  # the root's rank map, not an equal one
    mesh._rank_map, mesh._flatten_rank_map = shared.tensor, shared.ranks
    return shared
