"""Where merging is exact: a redistribution may run consecutive collectives of one kind as one on a flattened mesh.

The merged collective cuts the joint shards into equal parts, in the order of the flattened group. That is the nesting
of the single steps only where every cut is even, and where groups, whose ranks torch sorts, keep the mesh's order.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import weakref
from typing import TYPE_CHECKING

from torch.distributed.tensor.placement_types import Shard, _StridedShard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


# Of this thread alone: ranks may be threads, and backward passes run in threads of their own.
_may_merge: contextvars.ContextVar[bool] = contextvars.ContextVar("may_merge", default=True)


def may_merge() -> bool:
    """Whether the redistribution that runs here may merge collectives."""
    return _may_merge.get()


@contextlib.contextmanager
def merging(exact: bool) -> Iterator[None]:
    """Let the redistribution inside merge, or have its collectives run one by one."""
    token = _may_merge.set(exact)
    try:
        yield
    finally:
        _may_merge.reset(token)


def merging_is_exact(source: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether merged collectives give what every rank should hold.

    Decided from what every rank knows alike, the specs and the mesh, so that all ranks run the same collectives.
    """
    # While tracing, a mesh may come wrapped.
    mesh = getattr(source.mesh, "real_obj", source.mesh)
    return _in_rank_order(mesh) and all(_even(spec, source) for spec in (source, target))


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


# By mesh, since the rank map is as long as the world. Weak: nothing of a world stays for having been asked about.
_orders: weakref.WeakKeyDictionary[DeviceMesh, bool] = weakref.WeakKeyDictionary()


def _in_rank_order(mesh: DeviceMesh) -> bool:
    """Whether the ranks of every copy of the mesh ascend row-major, so that sorting them changes nothing."""
    known = _orders.get(mesh)
    if known is None:
        known = _orders[mesh] = _ascends(mesh)
    return known


def _ascends(mesh: DeviceMesh) -> bool:
    strides = [stride for axis in mesh._layout for stride in _as_tuple(axis.stride)]
    ranks = mesh._get_root_mesh()._flatten_rank_map
    descend = all(outer >= inner for outer, inner in itertools.pairwise(stride for stride in strides if stride))
    return descend and all(before < after for before, after in itertools.pairwise(ranks))


def _as_tuple(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else value
