"""Runs the steps of a plan by value, on all ranks of a mesh in one process: local tensors by coordinate."""

import itertools

import torch

from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Divide,
    Embed,
    Narrow,
    ReduceScatter,
)

SIZES = (2, 2, 2)
MOVED = (None, 0, 1)  # a mesh dim is replicated, or shards one of two tensor dims
REDUCE = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin, "product": torch.prod}


def pairs(sources=MOVED, targets=MOVED, mesh_dims=3):
    """Every source with every target, one entry for each mesh dim."""
    ends = (itertools.product(entries, repeat=mesh_dims) for entries in (sources, targets))
    return itertools.product(*ends)


def regions(spec, shape, sizes=SIZES) -> Regions:
    """One entry for each mesh dim: None, the tensor dim that it shards, or a pending reduction."""
    dims = [entry if isinstance(entry, int) else None for entry in spec]
    ops = [entry if isinstance(entry, str) else None for entry in spec]
    return Regions.of(dims, ops, shape, sizes)


def is_right(steps, before, after) -> bool:
    """Whether the steps start in the boxes of ``before``, end in those of ``after``, and give each rank what it should
    hold there. Where a reduction is pending in ``after``, the terms of all ranks are reduced and compared."""
    terms = {place: torch.rand(before.shape, dtype=torch.float64) for place in _places(before)}
    whole = {place: terms[tuple(i * (a in before.pending) for a, i in enumerate(place))] for place in terms}
    held, now = {place: _cut(whole[place], before.box(place)) for place in terms}, before.orders
    for step in steps:
        if not isinstance(step, Divide):
            if step.before.orders != now:
                return False
            now = step.after.orders
        held = run(step, held)
    wanted, got = _reduced(whole, before), _reduced(held, after)
    alike = [(got[place], _cut(wanted[place], after.box(place))) for place in got]
    return now == after.orders and all(one.shape == other.shape and torch.allclose(one, other) for one, other in alike)


def run(step, held):
    """The local tensors after a step. What nothing is written to is NaN."""
    if isinstance(step, Divide):
        return {place: local / step.by for place, local in held.items()}
    if isinstance(step, Narrow):
        return {place: _cut(local, step.box(place)) for place, local in held.items()}
    if isinstance(step, AllReduce):
        return {place: _reduce(step.op, [held[other] for other in step.members(place)]) for place in held}
    fill, sent = 0.0 if isinstance(step, Embed) else torch.nan, _sent(step, held)
    done = {place: torch.full(step.after.box(place).length, fill, dtype=torch.float64) for place in held}
    for place, local in done.items():
        if isinstance(step, Embed):
            _cut(local, step.box(place)).copy_(held[place])
        elif isinstance(step, ReduceScatter) and local.numel():
            local.copy_(_reduce(step.op, [sent[other, place] for other in step.members(place)]))
        elif isinstance(step, AllGather):
            for piece in step.pieces(place):
                _cut(local, piece.box).copy_(held[step.members(place)[piece.member]])
        elif isinstance(step, AllToAll):
            for piece in step.receives(place):
                part, came = _cut(local, piece.box), sent[step.members(place)[piece.member], place]
                part.copy_(_reduce(step.op, [part, came]) if piece.add else came)
    return done


def _sent(step, held):
    """By sender and receiver, what each rank sends to each, itself included."""
    if not isinstance(step, (ReduceScatter, AllToAll)):
        return {}
    pieces = step.sends if isinstance(step, AllToAll) else step.pieces
    return {
        (place, step.members(place)[piece.member]): _cut(local, piece.box)
        for place, local in held.items()
        for piece in pieces(place)
    }


def _places(of):
    return itertools.product(*map(range, of.sizes))


def _cut(local, box):
    """A view of a box of a local tensor; an empty box is nowhere."""
    if not box.elements:
        return local.new_empty(box.length)
    return local[tuple(slice(start, start + length) for start, length in zip(*box, strict=True))]


def _reduce(op, terms):
    return REDUCE[op](torch.stack(terms), 0)


def _reduced(held, ends):
    """The local tensors with all that is pending reduced."""
    for axis, (op, size) in enumerate(zip(ends.partial, ends.sizes, strict=True)):
        if op is not None:
            held = {
                place: _reduce(op, [held[(*place[:axis], i, *place[axis + 1 :])] for i in range(size)])
                for place in held
            }
    return held
