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
    first = _embed_first(source, target, made, have, itemsize, cost)
    # No more collectives than it takes one axis at a time with the new terms made where the shards are.
    most = min(collectives(last), len((source.pending - target.pending) | (misplaced(source, target) - made)))
    steps = cost.fastest([found for found in (last, first) if collectives(found) <= most], itemsize)
    parts = math.prod(source.sizes[a] for a in made - source.sharded if target.partial[a] == "sum")
    return steps if parts == 1 else (*steps, Divide(parts))


def _embed_last(
    source: Regions,
    target: Regions,
    made: frozenset[int],
    groups: Groups,
    itemsize: int,
    cost: Cost,
) -> tuple[Step, ...]:
    """To the target's boxes, still cut by the axes whose shards become terms of a sum; then the zeros around them.

    For example, S0·S0 to S0·P on (2, 2): nothing moves, and the zeros are where axis 1 cut.
    """
    kept = tuple(None if axis in made else op for axis, op in enumerate(target.partial))
    orders = [new + tuple(a for a in old if a in made) for old, new in zip(source.orders, target.orders)]
    middle = Regions(target.shape, target.sizes, tuple(orders), kept)
    steps = _reduce_and_move(source, middle, groups, itemsize, cost)
    return steps if middle.orders == target.orders else (*steps, Embed(middle, target))


def _embed_first(
    source: Regions,
    target: Regions,
    made: frozenset[int],
    groups: Groups,
    itemsize: int,
    cost: Cost,
) -> tuple[Step, ...]:
    """The zeros around each shard as soon as no other axis cuts inside of it, then to the target's boxes.

    For example, R·S0 to S0·P on (2, 2): each rank puts zeros around its shard, R·P, and narrows that.
    """
    steps: list[Step] = []
    now = _with_terms(source, target, made)
    while True:
        outer = _with_terms(now.cut([_without_last(order, made) for order in now.orders]), target, made)
        if outer != now:
            steps.append(Embed(now, outer))
            now = outer
        if made.isdisjoint(now.sharded):
            return (*steps, *_reduce_and_move(now, target, groups, itemsize, cost))
        bare = now.cut([_until_last(order, made) for order in now.orders])
        steps += move(now, bare, groups, itemsize, cost)
        now = bare


def _reduce_and_move(source: Regions, target: Regions, groups: Groups, itemsize: int, cost: Cost) -> tuple[Step, ...]:
    ended = source.pending - target.pending
    if not ended:
        return move(source, target, groups, itemsize, cost)
    if 0 in source.shape:
        return (Narrow(source, target),)
    ops = {op for axis, op in enumerate(source.partial) if op and axis in ended}
    # A sum of averages is a sum of terms that were divided by the number of those of the averages. Divided before the
    # sum, as NCCL does it, since the sum of many may be more than a short floating-point number can be.
    op, terms = ops.pop(), 1
    if ops:
        op, terms = "sum", math.prod(source.sizes[a] for a in ended if source.partial[a] == "avg")
    steps = Reduction(source, target, ended, op, groups, itemsize, cost).best()
    return steps if terms == 1 else (Divide(terms), *steps)
