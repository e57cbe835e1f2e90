"""A collective that joins or cuts one dim runs on tensors in their shape, as on the step-by-step path.

Inductor's patterns, async tensor parallelism among them, look for these operations; flat tensors they don't see. Where
a plan is one such collective, over one axis and evenly cut, and a dispatch mode looks on, the step-by-step path itself
will run. What is here serves eager code, and the steps of other plans.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor._collective_utils import pad_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from ._pack import MOVED, Local
from ._planner.regions import chunk, cut_last
from ._planner.steps import AllGather, AllToAll, Collective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._planner.regions import Box
    from ._planner.steps import ReduceScatter, Step
    from ._question import Question

_PLAIN_PLACEMENTS = frozenset((Shard, Replicate, Partial))


def gathered(step: AllGather, held: Box, wanted: Box) -> tuple[Local, Local | None] | None:
    """What a rank sends, and how what arrives becomes its new tensor, where the axes of the step are the last to cut a
    dim. None where no such dim is, where the new tensor is empty, or where several axes cut it unevenly. The second
    function is None where what arrives is the new tensor already.

    Over one axis, uneven shards are padded along the dim, as on the step-by-step path. So a rank that has to take that
    path and the others understand each other.

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
        return torch.cat([block.narrow(dim, 0, length) for block, length in blocks if length], dim)

    return pack, land


def scattered(step: ReduceScatter, held: Box, wanted: Box) -> Local | None:
    """What goes into the reduction where the axes of the step cut one dim, last and evenly; what comes
    out is the new tensor. Else None."""
    dim = cut_last(step.before, step.after, step.axes)
    size = step.ranks
    if dim is None or not wanted.elements or wanted.length[dim] * size != held.length[dim]:
        return None
    if dim == 0:
        return torch.Tensor.contiguous
    return lambda local: torch.cat(local.chunk(size, dim)).contiguous()  # cat may keep another memory format


def same_step_by_step(steps: Sequence[Step], question: Question, device_type: str) -> bool:
    """Whether a plan is one collective over one axis, evenly split, and the step-by-step path runs the same one.
    All-to-alls that path runs on accelerators only; on the CPU it gathers."""
    step = _one_collective(steps, question)
    if step is None:
        return False
    if isinstance(step, (AllGather, AllToAll)) and question.dtype not in MOVED:
        return False
    if isinstance(step, AllToAll) and (step.op is not None or device_type == "cpu"):
        return False
    orders = [pair for pair in zip(step.before.orders, step.after.orders) if pair[0] != pair[1]]
    bare = [[order[:-1] if order[-1:] == step.axes else order for order in pair] for pair in orders]
    return all(old == new for old, new in bare) and step.before.is_even and step.after.is_even


def pads_step_by_step(steps: Sequence[Step], question: Question, held: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a rank that should hold a local tensor of one shape, and has one of another, may gather it all the same:
    over one axis, where shards are uneven, the step-by-step path pads each along the dim to the longest, and so does
    `gathered`."""
    step = _one_collective(steps, question)
    if not isinstance(step, AllGather) or question.dtype not in MOVED:  # others move its bytes
        return False
    before, axes = step.before, step.axes
    dim = cut_last(step.after, before, axes)
    if dim is None or before.orders[dim] != axes or len(shape) != len(held):
        return False
    others = all(length == wanted for d, (length, wanted) in enumerate(zip(shape, held)) if d != dim)
    return others and before.shape[dim] % step.ranks != 0 and shape[dim] <= before.longest(dim)


def _one_collective(steps: Sequence[Step], question: Question) -> Collective | None:
    """A plan's only step, a collective over one axis, which alone changes, between plain placements; else None."""
    step = steps[0] if len(steps) == 1 else None
    if not isinstance(step, Collective) or len(step.axes) != 1 or not _PLAIN_PLACEMENTS.issuperset(question.kinds):
        return None
    ends = enumerate(zip(question.source, question.target, strict=True))
    changed = tuple([axis for axis, (old, new) in ends if old != new])
    orders = (question.source_order, question.target_order)
    plain = changed == step.axes and all(map(DTensorSpec.is_default_device_order, orders))
    return step if plain else None
