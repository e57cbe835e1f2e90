"""Pending reductions are done before a transfer: joined by mesh, axes, operation and type, one collective an axis."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from ..distributed.tensor._plans.packing import part
from ._planner.reductions import place_in
from .runs import free

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed.tensor._planner.regions import Box, Regions
    from ._planner.reductions import Reduced

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # of scaled terms, see `_scaled_down`
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}

_ON_BITS = ("band", "bor", "bxor")
_ON_GLOO = (
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)


def refusal(op: str, dtype: torch.dtype, device: str) -> str | None:
    """Why ranks can't bring terms of this type together by this operation; None if they can. The same on every rank.

    It is what torch refuses, too; by a reduce-scatter torch takes the maximum of complex numbers for each part.
    """
    number = dtype.is_floating_point or dtype.is_complex
    if op not in _OPS:
        return "no group reduces like this"
    if op == "avg" and not number:
        return "an average of whole numbers may be none"
    if op == "avg" and dtype.itemsize == 1:
        return "torch doesn't divide floats of eight bits"
    if op in _ON_BITS and number:
        return "only whole numbers are taken bit by bit"
    if dtype.is_complex and op not in ("sum", "avg"):
        return "complex numbers are only added"
    if dtype not in _ON_GLOO and _is_on_gloo(device):
        return "gloo has no reductions of this type"
    return None


def _is_on_gloo(device: str) -> bool:
    try:
        return _get_default_group()._get_backend(torch.device(device)).name() == "gloo"
    except (RuntimeError, ValueError):  # no such backend, or no world
        return False


class Term(NamedTuple):
    """This rank's term of a value.

    Attributes:
        number: what it is called in the answer.
        local: of the whole box that this rank holds.
        slab: what of the tensor is to be reduced now; None for all of it.
    """

    number: int
    local: torch.Tensor
    mesh: DeviceMesh
    reduction: Reduced
    slab: Box | None

    def box(self, regions: Regions, coordinate: Sequence[int]) -> Box:
        """What a coordinate holds of the slab."""
        box = regions.box(coordinate)
        return box if self.slab is None else box.meet(self.slab)


def reduced(terms: Iterable[Term]) -> dict[int, torch.Tensor]:
    """What each rank holds when nothing is pending any more, by number; in memory of its own.

    All ranks of a mesh call it with the same tensors in the same order.
    """
    joined: dict[tuple[DeviceMesh, tuple[tuple[int, str, bool], ...], torch.dtype], list[Term]] = {}
    for term in terms:
        joined.setdefault((term.mesh, term.reduction.steps, term.local.dtype), []).append(term)
    found: dict[int, torch.Tensor] = {}
    for some in joined.values():
        found |= _reduced_together(some)
    return found


def _reduced_together(terms: Sequence[Term]) -> dict[int, torch.Tensor]:
    mesh, steps = terms[0].mesh, terms[0].reduction.steps
    here: Sequence[int] = mesh.get_coordinate() or ()
    regions = [term.reduction.before for term in terms]
    held = [part(t.local, place_in(r.box(here), t.box(r, here))) for t, r in zip(terms, regions)]
    # Averages are taken of terms that are divided first, so that no sum is more than the greatest of them can be.
    scale = math.prod([_power_of_two(mesh.size(axis)) for axis, op, _ in steps if op == "avg"])
    flat = _divided(_flat(held), scale) if not steps[0][2] else None
    for number, (axis, op, scatters) in enumerate(steps):
        group = mesh.get_group(axis)
        if scatters:
            regions = [each.cut(_upto(term.reduction.after, each, axis)) for term, each in zip(terms, regions)]
            flat = _scattered(terms, regions, held, here, axis, _OPS[op], group, scale if not number else 1)
            held = _pieces(flat, [term.box(each, here).length for term, each in zip(terms, regions)])
        elif flat is not None and flat.numel():
            dist.all_reduce(flat, _OPS[op], group=group)
        if op == "avg" and flat is not None:
            _divided(flat, mesh.size(axis) / _power_of_two(mesh.size(axis)))
    if flat is None:
        raise AssertionError("what is pending is reduced in a step at least")
    boxes = [term.box(term.reduction.after, here).length for term in terms]
    return {term.number: piece for term, piece in zip(terms, _pieces(flat, boxes))}


def _power_of_two(ranks: int) -> int:
    """The smallest one that isn't less.

    Dividing by it is exact, but for numbers that are too small to be normal. So the terms are added as they are where
    they are divided afterwards, and the rest of the division rounds as that one does: (x / 4) / 0.75 is x / 3, to the
    bit.

    >>> [_power_of_two(ranks) for ranks in (1, 2, 3, 8, 9)]
    [1, 2, 4, 8, 16]
    """
    return 1 << (ranks - 1).bit_length()


def _divided(flat: torch.Tensor, by: float) -> torch.Tensor:
    """The same tensor, divided in place."""
    if by != 1:
        (torch.view_as_real(flat) if flat.is_complex() else flat).div_(by)
    return flat


def _upto(after: Regions, now: Regions, axis: int) -> list[tuple[int, ...]]:
    """The orders of `now`, with one axis more, as `after` has it."""
    return [(*old, axis) if axis in new and axis not in old else old for old, new in zip(now.orders, after.orders)]


def _scattered(
    terms: Sequence[Term],
    regions: Sequence[Regions],
    held: Sequence[torch.Tensor],
    here: Sequence[int],
    axis: int,
    op: dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup,
    scale: int,
) -> torch.Tensor:
    """This rank's parts, reduced, in one buffer; each rank along the axis gets its own. Terms are divided first."""
    coordinates = [(*here[:axis], at, *here[axis + 1 :]) for at in range(group.size())]
    boxes = [[term.box(each, at) for term, each in zip(terms, regions)] for at in coordinates]
    size = max([sum([box.elements for box in some]) for some in boxes])
    flat = held[0].new_empty(size * len(boxes))
    for number, some in enumerate(boxes):
        pieces = _pieces(flat.narrow(0, number * size, size), [box.length for box in some])
        for piece, local, box, term, each in zip(pieces, held, some, terms, regions):
            piece.copy_(part(local, place_in(term.box(_before(each, axis), here), box)))
    _divided(flat, scale)
    if size and dist.get_backend(group) == "gloo":
        # It reduces a copy of everything either way, and a thread of its own keeps that for a while.
        dist.all_reduce(flat, op, group=group)
        result = flat.narrow(0, here[axis] * size, size).clone()
    else:
        result = flat.new_empty(size)
        if size:
            scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # the name since torch 2.13
            scatter(result, flat, op, group=group)
    free(flat)
    return result


def _before(regions: Regions, axis: int) -> Regions:
    """Without the cut by this axis, which is the innermost of its dim."""
    return regions.cut([tuple([each for each in order if each != axis]) for order in regions.orders])


def _flat(held: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([local.reshape(-1) for local in held])


def _pieces(flat: torch.Tensor, lengths: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Views of these shapes, one after the other in a buffer that may have more at its end."""
    found, at = [], 0
    for length in lengths:
        elements = torch.Size(length).numel()
        found.append(flat.narrow(0, at, elements).view(length))
        at += elements
    return found
