"""Before a loaded mesh finds its groups by their ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed import device_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import ProcessGroup


def group_by_name(mesh: DeviceMesh, name: str, asked: Any, dim: int) -> ProcessGroup:
    """The group of this name."""
    return device_mesh._get_pg_from_name(mesh._get_root_mesh(), name)
