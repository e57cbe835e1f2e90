"""On trees that don't trace one rank for all yet (before 2.14), a group comes from nowhere but the mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed import device_mesh

from ._mesh_pickle import UNBOUND

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import ProcessGroup


def group_by_name(mesh: DeviceMesh, name: str, asked: Any, dim: int) -> ProcessGroup:
    """The group of this name.

    Raises:
        RuntimeError: a loaded mesh whose group doesn't exist in this process.
    """
    if name.startswith(UNBOUND):
        raise RuntimeError(
            f"This mesh was loaded, and no process group here has the ranks {name.removeprefix(UNBOUND)} of its axis. "
            "Build a mesh over these ranks first; the loaded one then finds its groups."
        )
    return device_mesh._get_pg_from_name(mesh._get_root_mesh(), name)
