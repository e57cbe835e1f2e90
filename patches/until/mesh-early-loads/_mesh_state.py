"""Before a mesh that was loaded early waits for a world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import get_rank, is_initialized

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RANK_ATTRIBUTES = ...
wait_for_world = ...
lay_aside = ...


def _finish(mesh: DeviceMesh, parent: DeviceMesh, groups: Sequence[str] | None) -> DeviceMesh:
    rank = getattr(parent, "_rank", None)
    if rank is None and parent._device_type != "xla" and is_initialized():
        rank = get_rank()  # a subclass that makes its own mesh may not say
    if rank is not None:
        mesh._rank = rank
        mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
    if groups is not None:
        mesh._dim_group_names = list(groups)
    return mesh
