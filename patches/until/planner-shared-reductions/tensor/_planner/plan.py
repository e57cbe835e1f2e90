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
    # At most one collective for each reduction that ends, and one for each cut that has to go and becomes no term.
    # `first` has no more: each of its collectives ends one of these reductions or gives up one of these cuts, and none
    # of them comes back. So one of both stays.
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
    # Sums and averages mix: all terms are divided by the number of ranks that are averaged, and then summed. They are
    # divided before the sum, as NCCL does it: the sum of many may be more than a short floating-point number can be.
    op, terms = ops.pop(), 1
    if ops:
        op, terms = "sum", math.prod(source.sizes[a] for a in ended if source.partial[a] == "avg")
    steps = Reduction(source, target, ended, op, groups, itemsize, cost).best()
    return steps if terms == 1 else (Divide(terms), *steps)
