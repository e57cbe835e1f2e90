"""Before single views can be private."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

is_apart = ...


def whose_groups(mesh: DeviceMesh) -> tuple[Any, ...]:
    """What tells a mesh from its equals with other groups, which must not stand for it where meshes are kept."""
    return (shared_state(mesh).private,)
