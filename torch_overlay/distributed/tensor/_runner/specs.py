"""From placements and specs to the planner's values, and from a step to the operations
that the step-by-step path would run. Also the target spec of a redistribution.

A collective that joins or cuts one dim runs on tensors in their own shape, not
flattened, as it does on the step-by-step path: Inductor's patterns, async tensor
parallelism among them, look for these operations. If a whole plan is one such
collective, over one axis and evenly cut, and a dispatch mode is on, the step-by-step
path itself runs. The functions here serve eager code, and the steps of other plans.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor._collective_utils import pad_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)

from .._planner.boxes import chunk
from .._planner.regions import Cuts, NotPlanned, common_prefix, cut_last
from .._planner.steps import AllGather, AllToAll, Collective, Divide
from .exchange import MOVED, Local

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import TensorMeta
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    from .._planner.boxes import Box
    from .._planner.steps import ReduceScatter, Step
    from .question import Question


Placements = tuple[Placement, ...]


def _read_placement(placement: Any) -> tuple[int | None, str | None, int]:
    """The dim that a placement shards, or None; its reduction, or None; its split
    factor."""
    kind = type(placement)
    if kind is Shard:
        return placement.dim, None, 1
    if kind is Replicate:
        return None, None, 1
    if kind is Partial:
        return None, placement.reduce_op, 1
    if kind is _StridedShard:
        return placement.dim, None, placement.split_factor
    if kind is _norm_class():
        # Pending powers are reduced, see `norm_ended`.
        return None, placement.reduce_op, 1
    raise NotPlanned(f"a placement of the class {kind.__name__}")


@lru_cache
def _norm_class() -> type[_NormPartial]:
    """Return the class of a pending norm."""
    # Not at the top: the module of operators imports redistribution, and so this file.
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    return _NormPartial


def norm_ended(
    source: Placements, target: Placements, sizes: tuple[int, ...]
) -> _NormPartial | None:
    """Return the norm whose terms are reduced over some axes: powers before the sum,
    the root after it. None if there is none."""
    pending = {placement for placement in source if placement.is_partial()}
    norm = next(
        (placement for placement in pending if type(placement) is _norm_class()), None
    )
    if norm is not None and len(pending) > 1:
        raise NotPlanned("terms of a norm beside terms of another reduction")
    pairs = list(zip(source, target, strict=True))
    new_terms = {new for old, new in pairs if new.is_partial() and new != old}
    if new_terms and (norm is not None or _norm_class() in map(type, new_terms)):
        if len(new_terms | pending) > 1 or any(
            old != new and not old.is_replicate()
            for old, new in pairs
            if new in new_terms or old == norm
        ):
            raise NotPlanned(
                "terms of a norm from something else, or something else's from a norm"
            )
        return None
    # Over axes of one rank nothing is reduced. Taking the power and then the root there
    # could change the value.
    return (
        norm
        if any(old == norm != new for (old, new), size in zip(pairs, sizes) if size > 1)
        else None
    )


def norm_made(source: Placements, target: Placements) -> _NormPartial | None:
    """Return the first norm whose terms are made from replicas, or None. Call
    `norm_ended` before, which raises NotPlanned if they aren't made from replicas."""
    return next(
        (
            new
            for old, new in zip(source, target)
            if new != old and type(new) is _norm_class()
        ),
        None,
    )


def into_terms(steps: tuple[Step, ...], norm: _NormPartial) -> tuple[Step, ...]:
    """Turn steps that make equal terms of a sum into those of a norm: n terms of x /
    n**(1 / p) have the p-norm x. Every Divide must be one that makes terms."""
    return tuple(
        [
            Divide(step.by ** (1 / norm.norm_type))
            if isinstance(step, Divide)
            else step
            for step in steps
        ]
    )


def gathers_step_by_step(question: Question) -> bool:
    """True if the step-by-step path gathers a dim, so that its result doesn't share
    storage with the source. It gathers from the first mesh dim on at which source and
    target cut it differently, also where only mesh dims of size 1 do and a plan does
    nothing."""
    old_orders = _orders_by_dim(question.source, question.source_order)
    new_orders = _orders_by_dim(question.target, question.target_order)
    for dim in {*old_orders, *new_orders}:
        old, new = old_orders.get(dim, ()), new_orders.get(dim, ())
        same = common_prefix(old, new)
        if any(question.sizes[axis] > 1 for axis in old[same:]):
            return True
    return False


def _orders_by_dim(
    placements: Placements, shard_order: Any
) -> dict[int, tuple[int, ...]]:
    """Return the mesh dims, also of size 1, that cut each tensor dim, outer to
    inner."""
    order = shard_order or DTensorSpec.compute_default_shard_order(placements)
    return {entry.tensor_dim: tuple(entry.mesh_dims) for entry in order}


class Ends(NamedTuple):
    """What the specs of a question say about tensors of any size.

    Attributes:
        before, after: the placements of source and target.
        norm: the norm whose terms are reduced, if any.
        made: the norm whose terms are made, if any.
    """

    before: Cuts
    after: Cuts
    norm: _NormPartial | None
    made: _NormPartial | None


def read_ends(question: Question, sizes: tuple[int, ...]) -> Ends:
    orders = question.source_order, question.target_order
    return _read_ends(
        question.source,
        question.target,
        question.kinds,
        *orders,
        len(question.shape),
        sizes,
    )


# `kinds` is in the key since an instance of a subclass of Partial equals a Partial.
@lru_cache(maxsize=1024)
def _read_ends(
    source: Placements,
    target: Placements,
    kinds: tuple[type, ...],
    source_order: Any,
    target_order: Any,
    ndim: int,
    sizes: tuple[int, ...],
) -> Ends:
    before, after = (
        read_cuts(source, source_order, ndim, sizes),
        read_cuts(target, target_order, ndim, sizes),
    )
    return Ends(
        before, after, norm_ended(source, target, sizes), norm_made(source, target)
    )


def read_cuts(
    placements: Placements, shard_order: Any, ndim: int, sizes: tuple[int, ...]
) -> Cuts:
    """Read the placements of a spec, for tensors with `ndim` dims."""
    order = None
    # The order of strided shards is in their split factors. Their spec has no explicit
    # order, or the default one.
    if shard_order is not None and not DTensorSpec.is_default_device_order(shard_order):
        order = [(entry.tensor_dim, tuple(entry.mesh_dims)) for entry in shard_order]
    dims, ops, factors = (
        zip(*map(_read_placement, placements)) if placements else ((), (), ())
    )
    strided = _StridedShard in map(type, placements)
    if strided and order is not None:
        raise NotPlanned("strided shards with a shard order of their own")
    try:
        return Cuts.of(dims, ops, ndim, sizes, order, factors if strided else None)
    except ValueError as error:
        # The step-by-step path refuses a wrong spec with its usual message.
        raise NotPlanned(str(error)) from error


# For these placements both paths run the same collective.
_SAME_STEP_BY_STEP = frozenset((Shard, Replicate, Partial))


def gathered(
    step: AllGather, held: Box, wanted: Box
) -> tuple[Local, Local | None] | None:
    """Return how to pack for an all-gather of one dim, and how to make the new local
    tensor from what arrives (None if that is it). None if the axes of the step aren't
    the last to cut one dim, the new tensor is empty, or several axes cut unevenly.

    Over one axis, uneven shards are padded along the dim, exactly as on the
    step-by-step path: a rank that has to take that path can gather together with ranks
    that run the plan.
    """
    dim = cut_last(step.after, step.before, step.axes)
    if dim is None or not wanted.elements:
        return None
    length, size = wanted.length[dim], step.ranks
    if held.length[dim] * size == length:
        return torch.Tensor.contiguous, _join_shards(size, dim, held, wanted)
    return _pad_and_join(size, dim, held, wanted) if len(step.axes) == 1 else None


def _join_shards(size: int, dim: int, held: Box, wanted: Box) -> Local | None:
    """Make the function that joins even shards along a dim; None if it does nothing."""
    if dim == 0:
        return None
    # The shards lie in memory one after the other, as the new tensor needs them.
    if math.prod(held.length[:dim]) == 1:
        shape = wanted.length
        return lambda arrived: arrived.view(shape)
    # all_gather_into_tensor joins along dim 0 only.
    return lambda arrived: torch.cat(arrived.chunk(size), dim)


def _pad_and_join(size: int, dim: int, held: Box, wanted: Box) -> tuple[Local, Local]:
    """Make the functions that pad an uneven shard, and join shards without padding."""
    lengths = [chunk(wanted.length[dim], size, member)[1] for member in range(size)]
    padding = lengths[0] - held.length[dim]
    rows_per_rank = lengths[0] if dim == 0 else held.length[0]

    def pack(local: torch.Tensor) -> torch.Tensor:
        return pad_tensor(local, dim, padding).contiguous()

    def land(arrived: torch.Tensor) -> torch.Tensor:
        blocks = zip(arrived.split(rows_per_rank), lengths, strict=True)
        return torch.cat(
            [block.narrow(dim, 0, length) for block, length in blocks if length], dim
        )

    return pack, land


def scattered(step: ReduceScatter, held: Box, wanted: Box) -> Local | None:
    """Return how to pack for a reduce-scatter whose axes cut one dim, last and evenly,
    so that the new local tensor comes out. None for any other step."""
    dim = cut_last(step.before, step.after, step.axes)
    size = step.ranks
    if (
        dim is None
        or not wanted.elements
        or wanted.length[dim] * size != held.length[dim]
    ):
        return None
    if dim == 0:
        return torch.Tensor.contiguous
    # A reduce-scatter needs a contiguous tensor; cat may keep another memory format.
    return lambda local: torch.cat(local.chunk(size, dim)).contiguous()


def same_step_by_step(
    steps: Sequence[Step], question: Question, device_type: str
) -> bool:
    """True if the step-by-step path surely runs this plan's one even collective."""
    step = _one_collective(steps, question)
    if step is None:
        return False
    # Other dtypes travel as bytes here.
    if isinstance(step, (AllGather, AllToAll)) and question.dtype not in MOVED:
        return False
    # On the CPU the step-by-step path gathers and cuts instead of an all-to-all.
    if isinstance(step, AllToAll) and (step.op is not None or device_type == "cpu"):
        return False
    orders = [
        pair
        for pair in zip(step.before.orders, step.after.orders)
        if pair[0] != pair[1]
    ]
    without_axis = [
        [order[:-1] if order[-1:] == step.axes else order for order in pair]
        for pair in orders
    ]
    return (
        all(old == new for old, new in without_axis)
        and step.before.is_even
        and step.after.is_even
    )


def pads_step_by_step(
    steps: Sequence[Step], question: Question, held: Sequence[int], shape: Sequence[int]
) -> bool:
    """True if a rank whose local tensor has a wrong shape may run the step-by-step path
    while the other ranks run this plan: their collectives match.

    The plan must be one all-gather over one axis that cuts a dim unevenly: both paths
    pad the shard along this dim to the longest. The shape must be wrong along this dim
    only, and no longer there.
    """
    step = _one_collective(steps, question)
    # The other ranks send other dtypes as bytes.
    if not isinstance(step, AllGather) or question.dtype not in MOVED:
        return False
    before, axes = step.before, step.axes
    dim = cut_last(step.after, before, axes)
    if dim is None or before.orders[dim] != axes or len(shape) != len(held):
        return False
    same_otherwise = all(
        length == wanted
        for d, (length, wanted) in enumerate(zip(shape, held))
        if d != dim
    )
    return (
        same_otherwise
        and before.shape[dim] % step.ranks != 0
        and shape[dim] <= before.largest_shape[dim]
    )


def _one_collective(steps: Sequence[Step], question: Question) -> Collective | None:
    """Return the only step of a plan if the step-by-step path would run the same: a
    collective over one axis, whose placement alone changes, of exact classes Shard,
    Replicate or Partial, and both shard orders are the default. Else None."""
    step = steps[0] if len(steps) == 1 else None
    if (
        not isinstance(step, Collective)
        or len(step.axes) != 1
        or not _SAME_STEP_BY_STEP.issuperset(question.kinds)
    ):
        return None
    ends = enumerate(zip(question.source, question.target, strict=True))
    changed = tuple([axis for axis, (old, new) in ends if old != new])
    orders = (question.source_order, question.target_order)
    plain = changed == step.axes and all(
        map(DTensorSpec.is_default_device_order, orders)
    )
    return step if plain else None


_KNOWN = frozenset((Shard, Replicate, Partial, _StridedShard))


def are_known_classes(classes: Iterable[type]) -> bool:
    """True if these are Shard, Replicate, Partial or _StridedShard themselves. An
    instance of a subclass may equal one of its base class and mean something else."""
    return _KNOWN.issuperset(classes)


def other_spec(
    meta: TensorMeta | None,
    source: tuple[Placement, ...],
    target: Sequence[Placement],
    kinds: tuple[type, ...],
    mesh: DeviceMesh,
) -> DTensorSpec | None:
    """Return a new target spec, which the caller may change, between placements of
    known classes; None if the tensor has these already. What follows from the
    placements alone is remembered with the mesh."""
    target = tuple(target)
    if source == target and kinds[: len(target)] == kinds[len(target) :]:
        return None
    # A mesh of a subclass has no shared state, so nothing is remembered for it.
    universe = mesh.__dict__.get("_in_universe")
    specs = universe.shared.remembered.specs if universe is not None else {}
    key = (target, kinds, universe and universe.view)
    attributes = specs.get(key)
    if attributes is None:
        if len(specs) >= 1024:
            specs.clear()
        attributes = specs[key] = dict(DTensorSpec(mesh, target).__dict__)
        del attributes["mesh"]  # or what is remembered would keep the mesh alive
    spec = object.__new__(DTensorSpec)
    # The caller's own mesh: an equal one may have other process groups.
    spec.__dict__.update(attributes, mesh=mesh, tensor_meta=meta)
    return spec
