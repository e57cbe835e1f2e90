"""The door from placements and specs to the planner's values, and from a step to what
the step-by-step path runs.

A collective that joins or cuts one dim runs on tensors in their shape, as on that path:
Inductor's patterns, async tensor parallelism among them, look for these operations;
flat tensors they don't see. Where a plan is one such collective, over one axis and
evenly cut, and a dispatch mode looks on, the step-by-step path itself will run. What is
here serves eager code, and the steps of other plans.

The spec in which a redistribution ends.
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

from .._planner.regions import Cuts, NotPlanned, chunk, common, cut_last
from .._planner.steps import AllGather, AllToAll, Collective, Divide
from .exchange import MOVED, Local

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import TensorMeta
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    from .._planner.regions import Box
    from .._planner.steps import ReduceScatter, Step
    from .question import Question


Placements = tuple[Placement, ...]


def _read_placement(placement: Any) -> tuple[int | None, str | None, int]:
    """The dim that it shards, the pending reduction, the split factor. Exactly these
    classes: a subclass may mean anything."""
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
        return None, placement.reduce_op, 1  # of powers, see `norm_ended`
    raise NotPlanned(f"a placement of the class {kind.__name__}")


@lru_cache
def _norm_class() -> type[_NormPartial]:
    # operators need redistribution, and so this file
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    return _NormPartial


def norm_ended(
    source: Placements, target: Placements, sizes: tuple[int, ...]
) -> _NormPartial | None:
    """The norm that a redistribution brings together over some axes: powers before the
    sum, the root after it.

    Raises:
        NotPlanned: terms of a norm beside terms of something else; or made from what is
            none, apart from replicas, see `norm_made`.
    """
    pending = {placement for placement in source if placement.is_partial()}
    norm = next(
        (placement for placement in pending if type(placement) is _norm_class()), None
    )
    if norm is not None and len(pending) > 1:
        raise NotPlanned("terms of a norm beside terms of another reduction")
    ends = list(zip(source, target, strict=True))
    made = {new for old, new in ends if new.is_partial() and new != old}
    if made and (norm is not None or _norm_class() in map(type, made)):
        if len(made | pending) > 1 or any(
            old != new and not old.is_replicate()
            for old, new in ends
            if new in made or old == norm
        ):
            raise NotPlanned(
                "terms of a norm from something else, or something else's from a norm"
            )
        return None
    # Over an axis of one rank the norm is there already, and its power might not be.
    return (
        norm
        if any(old == norm != new for (old, new), size in zip(ends, sizes) if size > 1)
        else None
    )


def norm_made(source: Placements, target: Placements) -> _NormPartial | None:
    """The norm of which replicas become terms, where `norm_ended` refuses nothing."""
    return next(
        (
            new
            for old, new in zip(source, target)
            if new != old and type(new) is _norm_class()
        ),
        None,
    )


def into_terms(steps: tuple[Step, ...], norm: _NormPartial) -> tuple[Step, ...]:
    """The steps that make equal terms of this norm, from those that make terms of a
    sum: n of x / n**(1 / p) have the p-norm x."""
    return tuple(
        [
            Divide(step.by ** (1 / norm.norm_type))
            if isinstance(step, Divide)
            else step
            for step in steps
        ]
    )


def gathers_step_by_step(question: Question) -> bool:
    """Whether the step-by-step path gathers a dim, maybe to cut it again, so that its
    result is a tensor of its own.

    It does so from the first mesh dim on in which source and target cut the tensor dim
    differently. Where the mesh dims that came or went have size 1, the shards are the
    same, and a plan has nothing to do.
    """
    old = _nested(question.source, question.source_order)
    new = _nested(question.target, question.target_order)
    for dim in {*old, *new}:
        one, other = old.get(dim, ()), new.get(dim, ())
        same = common(one, other)
        if any(question.sizes[axis] > 1 for axis in one[same:]):
            return True
    return False


def _nested(placements: Placements, shard_order: Any) -> dict[int, tuple[int, ...]]:
    """The mesh dims that cut each tensor dim, outer to inner, those of size 1 among
    them."""
    order = shard_order or DTensorSpec.compute_default_shard_order(placements)
    return {entry.tensor_dim: tuple(entry.mesh_dims) for entry in order}


class Ends(NamedTuple):
    """What the specs of a question say of tensors of any size, and the norm that it
    brings together, or makes terms of, if any."""

    before: Cuts
    after: Cuts
    norm: _NormPartial | None
    made: _NormPartial | None


def read_ends(question: Question, sizes: tuple[int, ...]) -> Ends:
    """What both specs say, on a mesh of these sizes. Raises as `read_cuts` and
    `norm_ended`."""
    orders = question.source_order, question.target_order
    return _read_ends(
        question.source,
        question.target,
        question.kinds,
        *orders,
        len(question.shape),
        sizes,
    )


# By class, too: a subclass of Partial calls itself equal to it.
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
    """What a spec says of tensors with so many dims.

    Raises:
        NotPlanned: placements of other classes, split factors that no order of axes
            makes, a reduction that the planner doesn't know, and specs that are wrong:
            the step-by-step path refuses these.
    """
    order = None
    # None, or the default, beside strided shards, whose split factors say their order.
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
    except ValueError as error:  # the step-by-step path refuses specs that are wrong
        raise NotPlanned(str(error)) from error


# of these that path runs the same collective
_SAME_STEP_BY_STEP = frozenset((Shard, Replicate, Partial))


def gathered(
    step: AllGather, held: Box, wanted: Box
) -> tuple[Local, Local | None] | None:
    """What a rank sends, and how what arrives becomes its new tensor, where the axes of
    the step are the last to cut a dim. None where no such dim is, where the new tensor
    is empty, or where several axes cut it unevenly. The second function is None where
    what arrives is the new tensor already.

    Over one axis, uneven shards are padded along the dim, as on the step-by-step path.
    So a rank that has to take that path and the others understand each other.

    Args:
        held, wanted: this rank's boxes before the step and after it.
    """
    dim = cut_last(step.after, step.before, step.axes)
    if dim is None or not wanted.elements:
        return None
    length, size = wanted.length[dim], step.ranks
    if held.length[dim] * size == length:
        return torch.Tensor.contiguous, _joined(size, dim, held, wanted)
    return _padded(size, dim, held, wanted) if len(step.axes) == 1 else None


def _joined(size: int, dim: int, held: Box, wanted: Box) -> Local | None:
    if dim == 0:
        return None
    if math.prod(held.length[:dim]) == 1:
        shape = wanted.length
        return lambda arrived: arrived.view(shape)
    return lambda arrived: torch.cat(arrived.chunk(size), dim)


def _padded(size: int, dim: int, held: Box, wanted: Box) -> tuple[Local, Local]:
    lengths = [chunk(wanted.length[dim], size, member)[1] for member in range(size)]
    missing = lengths[0] - held.length[dim]
    rows = lengths[0] if dim == 0 else held.length[0]

    def pack(local: torch.Tensor) -> torch.Tensor:
        return pad_tensor(local, dim, missing).contiguous()

    def land(arrived: torch.Tensor) -> torch.Tensor:
        blocks = zip(arrived.split(rows), lengths, strict=True)
        return torch.cat(
            [block.narrow(dim, 0, length) for block, length in blocks if length], dim
        )

    return pack, land


def scattered(step: ReduceScatter, held: Box, wanted: Box) -> Local | None:
    """What goes into the reduction where the axes of the step cut one dim, last and
    evenly; what comes out is the new tensor. Else None."""
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
    # cat may keep another memory format
    return lambda local: torch.cat(local.chunk(size, dim)).contiguous()


def same_step_by_step(
    steps: Sequence[Step], question: Question, device_type: str
) -> bool:
    """Whether a plan is one collective over one axis, evenly split, and the
    step-by-step path runs the same one. All-to-alls that path runs on accelerators
    only; on the CPU it gathers."""
    step = _one_collective(steps, question)
    if step is None:
        return False
    if isinstance(step, (AllGather, AllToAll)) and question.dtype not in MOVED:
        return False
    if isinstance(step, AllToAll) and (step.op is not None or device_type == "cpu"):
        return False
    orders = [
        pair
        for pair in zip(step.before.orders, step.after.orders)
        if pair[0] != pair[1]
    ]
    bare = [
        [order[:-1] if order[-1:] == step.axes else order for order in pair]
        for pair in orders
    ]
    return (
        all(old == new for old, new in bare)
        and step.before.is_even
        and step.after.is_even
    )


def pads_step_by_step(
    steps: Sequence[Step], question: Question, held: Sequence[int], shape: Sequence[int]
) -> bool:
    """Whether a rank that should hold a local tensor of one shape, and has one of
    another, may gather it all the same: over one axis, where shards are uneven, the
    step-by-step path pads each along the dim to the longest, and so does `gathered`."""
    step = _one_collective(steps, question)
    # others move its bytes
    if not isinstance(step, AllGather) or question.dtype not in MOVED:
        return False
    before, axes = step.before, step.axes
    dim = cut_last(step.after, before, axes)
    if dim is None or before.orders[dim] != axes or len(shape) != len(held):
        return False
    others = all(
        length == wanted
        for d, (length, wanted) in enumerate(zip(shape, held))
        if d != dim
    )
    return (
        others
        and before.shape[dim] % step.ranks != 0
        and shape[dim] <= before.longest[dim]
    )


def _one_collective(steps: Sequence[Step], question: Question) -> Collective | None:
    """A plan's only step, a collective over one axis, which alone changes, between
    plain placements; else None."""
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


def is_known(kinds: Iterable[type]) -> bool:
    """Whether placements of these classes are what they say: of another class, equal
    ones may differ."""
    return _KNOWN.issuperset(kinds)


def other_spec(
    meta: TensorMeta | None,
    source: tuple[Placement, ...],
    target: Sequence[Placement],
    kinds: tuple[type, ...],
    mesh: DeviceMesh,
) -> DTensorSpec | None:
    """What a tensor is to become, of known placements; None where it is that already.

    What follows from the placements is computed once for a mesh; each call makes a new
    spec, which the caller may change.
    """
    target = tuple(target)
    if source == target and kinds[: len(target)] == kinds[len(target) :]:
        return None
    # none has a mesh that isn't DeviceMesh's own
    known = mesh.__dict__.get("_in_universe")
    specs = known.shared.remembered.specs if known is not None else {}
    key = (target, kinds, known and known.view)
    made = specs.get(key)
    if made is None:
        if len(specs) >= 1024:
            specs.clear()
        made = specs[key] = dict(DTensorSpec(mesh, target).__dict__)
        del made["mesh"]  # else the spec would keep it
    spec = object.__new__(DTensorSpec)
    # The caller's own mesh and meta, never an equal mesh's.
    spec.__dict__.update(made, mesh=mesh, tensor_meta=meta)
    return spec
