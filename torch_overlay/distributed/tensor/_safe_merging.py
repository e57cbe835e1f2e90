"""Where merging is exact: a redistribution may run consecutive collectives of one kind as one on a flattened mesh.

The merged collective cuts the joint shards into equal parts, in the order of the flattened group. That is the nesting
of the single steps only where every cut is even, and where groups, whose ranks torch sorts, keep the mesh's order. An
all-reduce cuts nothing, so it may always be merged.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.tensor.placement_types import Shard, _StridedShard
from torch.fx.experimental.symbolic_shapes import guard_or_false

from .._mesh_traced import real_mesh

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


class Merging(NamedTuple):
    """What the redistribution that runs here may merge.

    Attributes:
        shards: collectives that cut or join shards.
        averages: reductions that average with others that sum.
    """

    shards: bool = True
    averages: bool = True


# Of this thread alone: ranks may be threads, and backward passes run in threads of their own.
_EVERYTHING = Merging()
_allowed: contextvars.ContextVar[Merging] = contextvars.ContextVar("allowed", default=_EVERYTHING)


@contextlib.contextmanager
def merging(allowed: Merging) -> Iterator[None]:
    """Let the redistribution inside merge as much, and no more."""
    token = _allowed.set(allowed)
    try:
        yield
    finally:
        _allowed.reset(token)


def runs_to_merge(infos: Sequence[Any]) -> list[Sequence[Any]]:
    """Torch's steps in runs: what is in one run may be merged, and a step that may not is a run of its own."""
    allowed = _allowed.get()
    if all(allowed):
        return [infos]
    runs: list[Sequence[Any]] = []
    for info in infos:
        if runs and _alike(runs[-1][-1], info, allowed):
            runs[-1] = [*runs[-1], info]
        else:
            runs.append([info])
    return runs


def _alike(one: Any, other: Any, allowed: Merging) -> bool:
    if not one._comm_type_key() == other._comm_type_key() == "all_reduce":
        return False
    return allowed.averages or one.src_dst_placements == other.src_dst_placements


def exact_merging(source: DTensorSpec, target: DTensorSpec) -> Merging:
    """What may be merged, so that every rank gets what it should hold.

    Decided from what every rank knows alike, the specs and the mesh, so that all ranks run the same collectives.
    """
    shards = _in_rank_order(real_mesh(source.mesh)) and all(_even(spec, source) for spec in (source, target))
    meta = source.tensor_meta
    # A sum that is divided afterwards is no whole number any more.
    return Merging(shards, meta is None or meta.dtype.is_floating_point or meta.dtype.is_complex)


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
    cut = [(size, count) for size, count in zip(source.shape, parts, strict=True) if count > 1]
    # Of a size that a compiler leaves open, by a guard.
    return all(guard_or_false(size % count == 0) for size, count in cut)


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
