"""Before 2.15 and before mesh-rank-order: groups sort their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.distributed import device_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def _blank(parent: DeviceMesh, root: DeviceMesh | None, names: Sequence[str] | None) -> DeviceMesh:
    mesh: DeviceMesh = object.__new__(device_mesh.DeviceMesh)
    mesh._device_type = parent._device_type
    mesh._mesh_dim_names = tuple(names) if names else None
    mesh._root_mesh = root
    mesh._flatten_mapping = {}
    mesh._pg_registry = {}
    mesh._thread_id = getattr(parent, "_thread_id", None)
    mesh._hash = None
    return mesh
