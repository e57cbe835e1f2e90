"""Before 2.15 and before mesh-rank-order: groups sort their ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._mesh_state import shared_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import GroupName

    from ._mesh_input import Override
    from ._mesh_layout import _FlatLayout


def _group_on(mesh: DeviceMesh, axis: _FlatLayout, name: str, override: Override) -> GroupName | None:
    """The name of this rank's new group on one axis; None on a rank outside."""
    return mesh._init_one_process_group(axis, shared_state(mesh).tensor, name, override)
