"""On trees whose DeviceMesh takes no ``preserve_rank_order`` yet (before 2.15): mesh-rank-order brings it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch.distributed.distributed_c10d import _get_default_group, get_rank, new_group

from ._mesh_layout import _MeshLayout
from ._mesh_state import shared_state
from ._timeouts import timeout_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import GroupName, ProcessGroup

    from ._mesh_input import Override
    from ._mesh_layout import _FlatLayout


def _group_on(mesh: DeviceMesh, axis: _FlatLayout, name: str, override: Override) -> GroupName | None:
    """The name of this rank's new group on one axis, in the order of a mesh that asks for it; None outside."""
    ranks = shared_state(mesh).tensor
    lines = _MeshLayout((axis,)).remap_to_tensor(ranks).tolist() if mesh._preserve_rank_order else []
    if all(line == sorted(line) for line in lines):
        return mesh._init_one_process_group(axis, ranks, name, override)
    backend, options = override
    timeout = options._timeout if options else timeout_of(_get_default_group())
    found: GroupName | None = None
    for line in lines:
        group = new_group(line, timeout, backend, options, group_desc=f"mesh_{name}", sort_ranks=False)
        found = cast("ProcessGroup", group).group_name if get_rank() in line else found
    return found
