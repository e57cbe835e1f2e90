"""Where torch's merging of collectives is exact: it runs consecutive steps of one kind as one on a flattened mesh.

The merged collective cuts the joint shards into equal parts, in the order of the flattened group. That is the nesting
of the single steps only where every cut is even, and where groups, whose ranks torch sorts, keep the mesh's order.
"""

from __future__ import annotations

import contextlib
import itertools
from functools import lru_cache
from typing import TYPE_CHECKING

from torch.distributed.tensor import _redistribute as torch_redistribute
from torch.distributed.tensor.placement_types import Shard, _StridedShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def merging_only_where_exact(source: DTensorSpec, target: DTensorSpec) -> contextlib.AbstractContextManager[None]:
    """A context in which torch merges collectives if both specs let it, and runs them one by one if not.

    Decided from what every rank knows alike, the specs and the mesh, so that all ranks run the same collectives.
    """
    # While tracing, a mesh may come wrapped.
    mesh = getattr(source.mesh, "real_obj", source.mesh)
    if _in_rank_order(mesh) and all(_even(spec, source) for spec in (source, target)):
        return contextlib.nullcontext()
    return torch_redistribute.disable_redistribute_transform_optimization()


def _even(spec: DTensorSpec, source: DTensorSpec) -> bool:
    """Whether all ranks hold shards of one size, in their plain order."""
    parts = [1] * len(source.shape)
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, _StridedShard):
            return False
        if isinstance(placement, Shard):
            if not 0 <= placement.dim < len(parts):
                return False  # torch has its own words for it
            parts[placement.dim] *= spec.mesh.size(axis)
    return all(type(size) is int and size % count == 0 for size, count in zip(source.shape, parts, strict=True))


@lru_cache(maxsize=64)  # the rank map is as long as the world
def _in_rank_order(mesh: DeviceMesh) -> bool:
    """Whether the ranks of every copy of the mesh ascend row-major, so that sorting them changes nothing."""
    strides = [stride for axis in mesh._layout for stride in _as_tuple(axis.stride)]
    ranks = mesh._get_root_mesh()._flatten_rank_map
    descend = all(outer >= inner for outer, inner in itertools.pairwise(stride for stride in strides if stride))
    return descend and all(before < after for before, after in itertools.pairwise(ranks))


def _as_tuple(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else value
