"""Before a loaded mesh takes rank and groups from the process that loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._mesh_state import shared_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def saved_state(mesh: DeviceMesh) -> dict[str, Any]:
    """What is pickled of a mesh, without what is true only in this process."""
    shared = shared_state(mesh)
    state = {name: value for name, value in mesh.__dict__.items() if name not in ("_view", "_shared_state")}
    state.pop("_pg_registry", None)
    state["_rank_map"] = shared.tensor
    state["_flatten_rank_map"] = shared.ranks
    state["_hash"] = None
    return state
