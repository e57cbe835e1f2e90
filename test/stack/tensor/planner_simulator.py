"""Runs the steps of a plan by value, on all ranks of a mesh in one process: local tensors by coordinate."""

import functools
import itertools
import math

import torch

from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Divide,
    Embed,
    Exchange,
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
    hold there. Where a reduction is pending in ``after``, the terms of all ranks are reduced and compared. Each step
    must start with the cuts in which the one before it ended; what is pending in between isn't checked."""
    terms = {place: torch.rand(before.shape, dtype=torch.float64) for place in _places(before)}
    # Replicas hold the same: what was drawn for coordinate 0 on each axis over which nothing is pending.
    whole = {place: terms[tuple(i * (a in before.pending) for a, i in enumerate(place))] for place in terms}
    held, now = {place: cut(whole[place], before.box(place)) for place in terms}, before.orders
    for step in steps:
        if not isinstance(step, Divide):
            if step.before.orders != now:
                return False
            now = step.after.orders
        held = run(step, held)
    wanted, got = _reduced(whole, before), _reduced(held, after)
    alike = [(got[place], cut(wanted[place], after.box(place))) for place in got]
    return now == after.orders and all(one.shape == other.shape and torch.allclose(one, other) for one, other in alike)


@functools.singledispatch
def run(step, held):
    """The local tensors after a step. What nothing is written to is NaN."""
    raise TypeError(f"run() knows no step such as {step}")


@run.register
def _(step: Divide, held):
    return {place: local / step.by for place, local in held.items()}


@run.register
def _(step: Narrow, held):
    return {place: cut(local, step.box(place)) for place, local in held.items()}


@run.register
def _(step: Embed, held):
    done = filled(step.after, 0.0)
    for place, local in done.items():
        cut(local, step.box(place)).copy_(held[place])
    return done


@run.register
def _(step: AllReduce, held):
    return {place: reduce(step.op, [held[other] for other in step.members(place)]) for place in held}


@run.register
def _(step: ReduceScatter, held):
    done, sent = filled(step.after), pieces_sent(step, held, step.pieces)
    for place, local in done.items():
        if local.numel():
            local.copy_(reduce(step.op, [sent[other, place] for other in step.members(place)]))
    return done


@run.register
def _(step: AllGather, held):
    done = filled(step.after)
    for place, local in done.items():
        for piece in step.pieces(place):
            cut(local, piece.box).copy_(held[step.members(place)[piece.member]])
    return done


def pieces_sent(step, held, pieces):
    """By sender and receiver, what each rank sends to each, itself included."""
    return {
        (place, step.members(place)[piece.member]): cut(local, piece.box)
        for place, local in held.items()
        for piece in pieces(place)
    }


def filled(ends, value=torch.nan):
    """A local tensor for each coordinate."""
    return {place: torch.full(ends.box(place).length, value, dtype=torch.float64) for place in _places(ends)}


def _places(of):
    return itertools.product(*map(range, of.sizes))


def cut(local, box):
    """A view of a box of a local tensor; an empty box is nowhere."""
    if not box.elements:
        return local.new_empty(box.length)
    return local[tuple(slice(start, start + length) for start, length in zip(*box, strict=True))]


def reduce(op, terms):
    return REDUCE[op](torch.stack(terms), 0)


def _reduced(held, ends):
    """The local tensors with all that is pending reduced."""
    for axis, (op, size) in enumerate(zip(ends.partial, ends.sizes, strict=True)):
        if op is not None:
            held = {
                place: reduce(op, [held[(*place[:axis], i, *place[axis + 1 :])] for i in range(size)]) for place in held
            }
    return held


@run.register
def _(step: AllToAll, held):
    done, sent = filled(step.after), pieces_sent(step, held, step.sends)
    for place, local in done.items():
        for piece in step.receives(place):
            part, came = cut(local, piece.box), sent[step.members(place)[piece.member], place]
            part.copy_(reduce(step.op, [part, came]) if piece.add else came)
    return done


def exchange(old, new, length: int, sizes) -> Exchange:
    """Of a tensor of one dim; ``old`` and ``new`` have 0 for each mesh dim that shards it."""
    nothing = (None,) * len(sizes)
    before, after = (Regions.of(dims, nothing, (length,), sizes) for dims in (old, new))
    return Exchange(before, after, tuple(range(len(sizes))))


def sent(asked: Exchange, diagonals) -> int:
    """What the busiest rank sends to others, counted: each rank asks, for each shard, its nearest replica or the one on
    its diagonal."""
    sizes, most = asked.before.sizes, {}
    for wanting in itertools.product(*map(range, sizes)):
        others = [range(size) if axis in asked.shards else (wanting[axis],) for axis, size in enumerate(sizes)]
        for sender in map(list, itertools.product(*others)):
            for diagonal in diagonals:
                diagonal.follow(sender, wanting)
            held, wanted = asked.before.box(sender), asked.after.box(wanting)
            ends = zip(held.start, held.length, wanted.start, wanted.length)
            common = [max(0, min(a + m, b + n) - max(a, b)) for a, m, b, n in ends]
            most[tuple(sender)] = most.get(tuple(sender), 0) + math.prod(common) * (tuple(sender) != wanting)
    return max(most.values())
