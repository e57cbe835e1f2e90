"""Moves: from boxes to other boxes, with no reduction.

Ranks that hold the same piece are replicas of one another. A rank can get each piece that it wants from the replica
that has its own coordinate on every axis along which the replicas differ. So a move needs a group over axes that cut
the source, and no others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .cost import EXCHANGE, arriving, arriving_by, collectives
from .regions import common, lengths, longest, same_pieces
from .senders import Exchange
from .steps import AllGather, AllToAll, Narrow, Step

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from .cost import Cost, Groups
    from .regions import Regions


def crossed(before: Regions, after: Regions) -> frozenset[int]:
    """The axes along which some rank and the nearest holder of a piece that it wants have different coordinates. Empty
    only if every rank has what it wants.

    With empty shards there may be more axes: those that only ranks who want nothing would have crossed.
    """
    if 0 in after.shape:
        return frozenset()
    axes: set[int] = set()
    for dim, (old, new) in enumerate(zip(before.orders, after.orders)):
        if old == new:
            continue
        depth = common(old, new)
        rest = old[depth:]
        # On the axes that cut the dim before, a piece has one holder. If an axis doesn't cut the dim after, ranks at
        # all its coordinates want the piece. If it does, the ranks that want the piece may be where its holder is.
        axes.update([a for a in rest if a not in new])
        if any(a in new for a in rest):
            blocks = lengths(before.shape[dim], [before.sizes[a] for a in old[:depth]])
            axes.update([a for a in rest if a in new and _crosses(a, blocks, rest, new[depth:], before.sizes)])
    return frozenset(axes)


def _crosses(
    axis: int, blocks: Collection[int], old: tuple[int, ...], new: tuple[int, ...], sizes: tuple[int, ...]
) -> bool:
    """Whether an element of blocks so long, cut by these axes before and by those after, may be at other coordinates
    on `axis`. It isn't where the other axes make the same pieces for `axis` to cut, or none of more than one
    element, which is at 0 then."""
    for block in blocks:
        one, other = ([sizes[a] for a in order[: order.index(axis)]] for order in (old, new))
        if max(longest(block, one), longest(block, other)) > 1 and not same_pieces(block, one, other):
            return True
    return False


def misplaced(before: Regions, after: Regions) -> frozenset[int]:
    """The axes whose cuts have to go: on each dim, all from the outermost cut on that `after` doesn't have at that
    depth."""
    return frozenset([a for old, new in zip(before.orders, after.orders) for a in old[common(old, new) :]])


def cut_toward(before: Regions, toward: Regions, allowed: Collection[int]) -> Regions:
    """Cut `before` further by the allowed axes, as far as each cut is a cut of `toward` too. Needs no communication
    if these axes are free."""
    if not allowed:
        return before
    orders = []
    for old, new in zip(before.orders, toward.orders):
        depth = len(old)
        if depth < len(new) and new[:depth] == old:
            while depth < len(new) and new[depth] in allowed:
                depth += 1
            old = new[:depth]
        orders.append(old)
    return before.cut(orders)


def move(
    before: Regions, after: Regions, groups: Groups, itemsize: int, cost: Cost, limit: float = math.inf
) -> tuple[Step, ...]:
    """The best plan from `before` to `after`, whose pending reductions are the same. With no more than `limit`
    collectives, unless the groups at hand ask for more."""
    axes = crossed(before, after)
    if not axes:
        return () if before == after else (Narrow(before, after),)
    plans = list(_in_one(before, after, axes, groups))
    if plans and groups.has(axes):
        return cost.fastest(plans, itemsize)
    one_by_one = _one_group_at_a_time(before, after, groups, itemsize, cost)
    if not plans:
        return one_by_one
    # More collectives that bring no more may be faster: a group over more axes than need be has more latency.
    if arriving_by(one_by_one) <= min(map(arriving_by, plans)) and collectives(one_by_one) <= limit:
        plans.append(one_by_one)
    return cost.fastest(plans, itemsize)


def _in_one(before: Regions, after: Regions, axes: frozenset[int], groups: Groups) -> Iterator[tuple[Step, ...]]:
    """The plans with one collective."""
    # Narrowing is a view, and what is left is cut by the group alone.
    narrow = cut_toward(before, after, before.free)
    first = () if narrow == before else (Narrow(before, narrow),)
    group = tuple(sorted(axes))
    if groups.has(axes) and all(old[: len(new)] == new for old, new in zip(narrow.orders, after.orders)):
        gather = AllGather(narrow, after, group)
        # Its cost would always be less than that of an all-to-all. But padding is sent, too, and takes memory: one row
        # that 64 ranks want is 64 rows in a gather.
        if arriving(gather) <= EXCHANGE * arriving(AllToAll(narrow, after, group)):
            yield (*first, gather)
            return
    for step in all_to_alls(Exchange(narrow, after, group), before.free, groups):
        yield (*first, step)


def all_to_alls(exchange: Exchange, free: frozenset[int], groups: Groups, op: str | None = None) -> Iterator[AllToAll]:
    """The all-to-alls for an exchange, over groups with at least its axes, which the nearest senders need. A group with
    more axes is taken if it balances the senders, or if there is no other: where the nearest replicas would send much
    and others nothing, all of them can send; see `senders`.

    Only axes are added that are replicated in the source and cut the target: an axis whose placement stays takes no
    part. `free` is that of the source before it was narrowed.
    """
    before, after, axes, reduced = exchange
    nearest = groups.has(axes)
    more = free & after.sharded
    if nearest and more:
        more = exchange.tied()
    if nearest and not more:
        yield AllToAll(before, after, axes, op, reduced)
        return
    for group in groups.between(axes, more.union(axes)):
        diagonals = exchange._replace(axes=group).diagonals()
        if diagonals or group == axes or not nearest:
            yield AllToAll(before, after, group, op, reduced, diagonals)


def _one_group_at_a_time(
    before: Regions, after: Regions, groups: Groups, itemsize: int, cost: Cost
) -> tuple[Step, ...]:
    """One group at a time: from the inside out, give up the cuts that the target doesn't have, and make those that it
    has as soon as they fit.

    For example, S0·S1 to S1·S0 on (2, 2), without their joint group: an all-gather gives up the cut of dim 0 by axis 0,
    R·S1. The cut of dim 1 by axis 0 doesn't fit yet, since axis 1 cuts that dim and the target has axis 0 alone there.
    Then an all-to-all over axis 1 gives up that cut and makes both that the target has, S1·S0.
    """
    steps: list[Step] = []
    now = before
    while crossed(now, after):
        made, now = next_collective(now, after, groups, itemsize, cost)
        steps += made
    return (*steps, *(() if now == after else (Narrow(now, after),)))


def next_collective(
    now: Regions, after: Regions, groups: Groups, itemsize: int, cost: Cost
) -> tuple[tuple[Step, ...], Regions]:
    """One collective on the way to `after`, and where it leads."""
    then = _next_boxes(now, after, groups)
    axes = crossed(now, then)
    if not axes:
        return (Narrow(now, then),), then
    return cost.fastest(list(_in_one(now, then, axes, groups)), itemsize), then


def _next_boxes(now: Regions, after: Regions, groups: Groups) -> Regions:
    # By the group that gives up most cuts; of equals the one that leaves the smallest boxes.
    wrong = misplaced(now, after)
    found = []
    for group in groups.within(wrong):
        popped = _without(now, after, group)
        then = cut_toward(popped, after, popped.free)
        if popped.sharded.isdisjoint(group) and (len(group) == 1 or groups.has(crossed(now, then))):
            found.append((-len(group), then.most, -_unblocked(now, after, group), groups.count(group), group, then))
    if found:
        return min(found)[-1]
    # Not reached: of a dim with misplaced cuts the innermost is one, and its axis has a group.
    raise AssertionError(
        f"from {now} to {after} the cuts by {sorted(wrong)} have to go, and no group at hand gives any of them up"
    )


def _unblocked(now: Regions, after: Regions, group: tuple[int, ...]) -> int:
    """On how many dims the group's cuts are in the way of others that the target wants."""
    found = 0
    for old, new in zip(now.orders, after.orders):
        depth = common(old, new)
        found += depth < len(new) and not set(old[depth:]).isdisjoint(group)
    return found


def _without(now: Regions, after: Regions, group: tuple[int, ...]) -> Regions:
    """`now` without its innermost cuts, as long as they are the group's and not the target's."""
    orders = []
    for old, new in zip(now.orders, after.orders):
        depth, keep = len(old), common(old, new)
        while depth > keep and old[depth - 1] in group:
            depth -= 1
        orders.append(old[:depth])
    return now.cut(orders)
