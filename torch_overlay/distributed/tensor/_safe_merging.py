"""Where merging is exact: torch may run consecutive collectives of one kind as one over a flattened mesh.

The merged collective cuts the joint shard into equal parts. Those are the parts of the single steps only where each of
the steps cuts evenly. An all-reduce cuts nothing, so it may always be merged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor.placement_types import Shard
from torch.fx.experimental.symbolic_shapes import guard_or_false

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def cuts_evenly(info: Any, device_mesh: DeviceMesh) -> bool:
    """Whether a step, one of torch's transform infos, cuts its dim into equal parts, or cuts nothing.

    The ranks of one merged collective all answer alike: they hold the same part of what the axes outside of it cut. A
    size that a compiler leaves open is even if a guard says so.
    """
    source, target = info.src_dst_placements
    if source.is_partial() and target.is_replicate():
        return True
    shard = target if source.is_partial() else source
    if type(shard) is not Shard or not 0 <= shard.dim < len(info.logical_shape):
        return False  # a strided shard is cut in another order; of a wrong dim torch has its own words
    return guard_or_false(info.logical_shape[shard.dim] % device_mesh.size(info.mesh_dim) == 0)
