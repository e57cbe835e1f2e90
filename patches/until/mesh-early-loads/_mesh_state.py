"""Before a mesh that was loaded early waits for a world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OF_THE_RANK = ...
wait_for_world = ...
lay_aside = ...


def _finish(mesh: DeviceMesh, parent: DeviceMesh, groups: Sequence[str] | None) -> DeviceMesh:
    rank = parent.__dict__.get("_rank")
    if rank is not None:
        mesh._rank = rank
        mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
    if groups is not None:
        mesh._dim_group_names = list(groups)
    return mesh
