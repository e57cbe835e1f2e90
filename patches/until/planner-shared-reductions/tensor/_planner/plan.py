"""Before it is asked which dims the plans for a reduction would cut."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .cost import Cost
from .groups import Groups
from .regions import Regions
from .steps import Step


def plan_at_once(
    source: Regions,
    target: Regions,
    itemsize: int,
    groups: Iterable[Iterable[int]] | None,
    cost: Cost,
) -> tuple[Step, ...]:
    """`plan`, with no step in rounds."""
    if (source.shape, source.sizes) != (target.shape, target.sizes):
        raise ValueError(f"no way from {source.shape} on {source.sizes} to {target.shape} on {target.sizes}")
    have = Groups.of(groups, source.sizes)
    return _with_reductions(source, target, have, itemsize, cost)


def _with_reductions(source: Regions, target: Regions, have: Groups, itemsize: int, cost: Cost) -> tuple[Step, ...]:
    made = _made_pending(source, target)
    if not made:
        return _reduce_and_move(source, target, have, itemsize, cost)
    last = _embed_last(source, target, made, have, itemsize, cost)
    first = _embed_first(source, target, made, have, itemsize, cost) if made & source.sharded else last
    # No more collectives than it takes one axis at a time with the new terms made where the shards are. One of
    # both is always found: each collective of `first` ends a reduction over one more of these axes, or moves one more.
    most = min(collectives(last), len((source.pending - target.pending) | (misplaced(source, target) - made)))
    steps = cost.fastest([found for found in (last, first) if collectives(found) <= most], itemsize)
    parts = math.prod(source.sizes[a] for a in made - source.sharded if target.partial[a] == "sum")
    return steps if parts == 1 else (*steps, Divide(parts))


def _reduce_and_move(source: Regions, target: Regions, groups: Groups, itemsize: int, cost: Cost) -> tuple[Step, ...]:
    ended = source.pending - target.pending
    if not ended:
        return move(source, target, groups, itemsize, cost)
    if 0 in source.shape and source.orders != target.orders:
        return (Narrow(source, target),)  # nothing to reduce; else it's all-reduces, as for all other sizes
    ops = {op for axis, op in enumerate(source.partial) if op and axis in ended}
    # A sum of averages is a sum of terms that were divided by the number of those of the averages. Divided before the
    # sum, as NCCL does it, since the sum of many may be more than a short floating-point number can be.
    op, terms = ops.pop(), 1
    if ops:
        op, terms = "sum", math.prod(source.sizes[a] for a in ended if source.partial[a] == "avg")
    steps = Reduction(source, target, ended, op, groups, itemsize, cost).best()
    return steps if terms == 1 else (Divide(terms), *steps)
