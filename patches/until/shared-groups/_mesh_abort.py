"""Before groups are shared: a mesh owns the groups in its registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d

from ._mesh_state import shared_state

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def _owned(mesh: DeviceMesh) -> list[ProcessGroup]:
    default = distributed_c10d._get_default_group() if distributed_c10d.is_initialized() else None
    groups = dict.fromkeys(shared_state(mesh).registry.values())
    return [group for group in groups if group is not default and group in distributed_c10d._world.pg_map]
