"""Before the cuts that a plan made earlier count."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from torch.distributed.tensor import _redistribute as torch_redistribute
from torch.distributed.tensor.placement_types import Shard
from torch.fx.experimental.symbolic_shapes import guard_or_false

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def _cuts_evenly(infos: list[torch_redistribute._TransformInfo], device_mesh: DeviceMesh) -> bool:
    """Whether every cut is even that these all-gathers undo, or these reduce-scatters make.

    Only then is torch.chunk by all their mesh dims at once sure to be torch.chunk by one
    after the other: 6 rows are 2, 2, 2, 0 on four ranks, and 2, 1, 2, 1 on a 2 x 2 mesh.
    """
    source, target = infos[0].src_dst_placements
    if source.is_partial():
        dim, outermost = cast("Shard", target).dim, infos[0]
    else:
        dim, outermost = cast("Shard", source).dim, infos[-1]
    parts = math.prod(device_mesh.size(info.mesh_dim) for info in infos)
    return guard_or_false(outermost.logical_shape[dim] % parts == 0)
