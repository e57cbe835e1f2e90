"""The groups of a mesh's own axes, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def group_names(mesh: DeviceMesh) -> list[str] | None:
    """The name of this rank's group on each axis; none on a rank outside. None for a mesh that was made without groups.

    It is the mesh's own list, not a copy.
    """
    return getattr(mesh, "_dim_group_names", None)
