"""Before ranks are made on request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def saved_state(mesh: DeviceMesh) -> dict[str, Any]:
    """What is pickled of a mesh: its attributes, without its state, its groups and its hash."""
    state = {name: value for name, value in mesh.__dict__.copy().items() if name not in NOT_PICKLED}
    state["_hash"] = None
    return state
