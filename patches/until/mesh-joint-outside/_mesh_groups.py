"""Before a rank outside a mesh knows the backends of its axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d

from ._group_table import find_group
from ._mesh_group_names import group_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ._mesh_input import Override
    from ._universe import Universe


def override_of(mesh: DeviceMesh, universe: Universe | None, axis: int) -> Override:
    """The backend and options that an axis of a mesh has; of a group that wasn't made here, its backend; nothing on a
    rank outside."""
    held = group_names(mesh)
    if not held:
        return (None, None)
    if universe is not None and held[axis] in universe.overrides:
        return universe.overrides[held[axis]]
    group = find_group(held[axis])
    if group is None or group is distributed_c10d._get_default_group():
        return (None, None)
    return (distributed_c10d.get_backend(group), None)
