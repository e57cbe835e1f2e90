"""Moves: from boxes to other boxes, with no reduction. One collective if its group is at hand.

The rule behind all of it: what a rank wants lies in boxes of the source that don't overlap, and of the holders of such
a box the nearest is where the rank is on every axis along which the source is the same. So a move crosses only axes
that cut the source. Standard library only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .cost import arriving_by
from .steps import AllGather, AllToAll, Narrow, Step

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from .cost import Cost
    from .regions import Regions

Parts = Sequence[frozenset[int]]


@dataclass(frozen=True, slots=True)
class Groups:
    """Which joint groups exist: all (`axes` is None), or these axis tuples and every single axis."""

    sizes: tuple[int, ...]
    axes: frozenset[tuple[int, ...]] | None = None

    @staticmethod
    def of(axes: Iterable[Iterable[int]] | None, sizes: tuple[int, ...]) -> Groups:
        """Sorted, and without axes of size 1."""
        if axes is None:
            return Groups(sizes)
        joint = (tuple(sorted(a for a in group if sizes[a] > 1)) for group in axes)
        return Groups(sizes, frozenset(group for group in joint if len(group) > 1))

    def has(self, axes: Collection[int]) -> bool:
        """Is there a group over exactly these axes?"""
        return len(axes) == 1 or self.axes is None or tuple(sorted(axes)) in self.axes

    def count(self, axes: Iterable[int]) -> int:
        """How many ranks a group over these axes has."""
        return math.prod(self.sizes[a] for a in axes)

    def within(self, axes: Collection[int]) -> list[tuple[int, ...]]:
        """All groups over some of these axes, the biggest first."""
        joint = [tuple(sorted(axes))] if self.axes is None else [g for g in self.axes if set(g).issubset(axes)]
        found = {*joint, *((a,) for a in axes)} if axes else set()
        return sorted(found, key=lambda group: (-self.count(group), group))

    def cover(self, axes: Collection[int]) -> list[tuple[int, ...]]:
        """Disjoint groups over all of these axes, the biggest first."""
        left, found = set(axes), []
        while left:
            found.append(self.within(left)[0])
            left.difference_update(found[-1])
        return found


def crossed(before: Regions, after: Regions) -> frozenset[int]:
    """The axes along which something has to move; empty if every rank has what it wants.

    Exact up to this: with empty shards an axis may be named that only ranks who want nothing would have crossed.
    """
    if 0 in after.shape:
        return frozenset()
    axes: set[int] = set()
    for dim, (old, new) in enumerate(zip(before.orders, after.orders)):
        if old == new:
            continue
        rest = old[common(old, new) :]
        # A wanted piece has one holder on the axes of its dim. An axis that doesn't cut the target there leaves ranks
        # that want the piece at all its coordinates; one that does may happen to be where the piece is.
        axes.update([a for a in rest if a not in new])
        both = [a for a in rest if a in new]
        if both:
            axes.update(_apart(before, after, dim, both))
    return frozenset(axes)


def misplaced(before: Regions, after: Regions) -> frozenset[int]:
    """The axes whose cuts have to go: `after` doesn't have them, or has them inside of others."""
    return frozenset([a for old, new in zip(before.orders, after.orders) for a in old[common(old, new) :]])


def push(before: Regions, toward: Regions, allowed: Collection[int]) -> Regions:
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


def move(before: Regions, after: Regions, groups: Groups, itemsize: int, cost: Cost) -> tuple[Step, ...]:
    """The best plan from `before` to `after`, whose pending reductions are the same."""
    axes = crossed(before, after)
    if not axes:
        return () if before == after else (Narrow(before, after),)
    plans = list(_at_once(before, after, axes, groups))
    if not groups.has(axes):
        plans.append(_one_group_at_a_time(before, after, groups, itemsize, cost))
    elif cost.axes and len(axes) > 1:
        # A joint group is as slow as its slowest axis. More collectives that bring no more may be faster.
        most = min(map(arriving_by, plans))
        turns = [_one_group_at_a_time(before, after, groups, itemsize, cost, parts) for parts in cost.by_speed(axes)]
        plans += [plan for plan in turns if arriving_by(plan) <= most]
    return cost.fastest(plans, itemsize)


def _at_once(before: Regions, after: Regions, axes: frozenset[int], groups: Groups) -> Iterable[tuple[Step, ...]]:
    # Narrowing is a view, and what is left is cut by the group alone.
    narrow = push(before, after, before.free)
    first = () if narrow == before else (Narrow(before, narrow),)
    if not groups.has(axes):
        return
    group = tuple(sorted(axes))
    if all(old[: len(new)] == new for old, new in zip(narrow.orders, after.orders)):
        gather = AllGather(narrow, after, group)
        yield (*first, gather)
        if gather.ranks * gather.chunk == after.most:
            return  # no padding: an all-to-all would bring the same
    yield (*first, AllToAll(narrow, after, group))


def _one_group_at_a_time(
    before: Regions, after: Regions, groups: Groups, itemsize: int, cost: Cost, parts: Parts = ()
) -> tuple[Step, ...]:
    """One group at a time: from the inside out, give up the cuts that the target doesn't have, and make those that it
    has as soon as they fit. With `parts`, only by groups within one of these sets of axes, the first set first."""
    steps: list[Step] = []
    now = before
    while crossed(now, after):
        made, now = next_collective(now, after, groups, itemsize, cost, parts)
        steps += made
    return (*steps, *(() if now == after else (Narrow(now, after),)))


def next_collective(
    now: Regions, after: Regions, groups: Groups, itemsize: int, cost: Cost, parts: Parts = ()
) -> tuple[tuple[Step, ...], Regions]:
    """One collective on the way to `after`, and where it leads."""
    then = _next_boxes(now, after, groups, parts)
    axes = crossed(now, then)
    return cost.fastest(list(_at_once(now, then, axes, groups)), itemsize) if axes else (Narrow(now, then),), then


def _next_boxes(now: Regions, after: Regions, groups: Groups, parts: Parts) -> Regions:
    # By the group that gives up most cuts; of equals the one that leaves the smallest boxes.
    wrong = misplaced(now, after)
    for part in (*parts, wrong):
        found = []
        for group in groups.within(wrong & part):
            popped = _without(now, after, group)
            then = push(popped, after, popped.free)
            if popped.sharded.isdisjoint(group) and (len(group) == 1 or groups.has(crossed(now, then))):
                found.append((-len(group), then.most, -_unblocked(now, after, group), groups.count(group), group, then))
        if found:
            return min(found)[-1]
    raise AssertionError(f"{now} to {after} crosses {sorted(wrong)}, and no group at hand gives any of these cuts up")


def _unblocked(now: Regions, after: Regions, group: tuple[int, ...]) -> int:
    """How much the group's cuts are in the way of others that the target wants: 1 for each dim where they are, and 1
    more where nothing else is."""
    found = 0
    for old, new in zip(now.orders, after.orders):
        depth = common(old, new)
        blocking = set(old[depth:])
        if depth < len(new) and not blocking.isdisjoint(group):
            found += 1 + blocking.issubset(group)
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


def common(old: tuple[int, ...], new: tuple[int, ...]) -> int:
    """How many axes from the outermost on two orders have in common."""
    depth, most = 0, min(len(old), len(new))
    while depth < most and old[depth] == new[depth]:
        depth += 1
    return depth


def _apart(before: Regions, after: Regions, dim: int, axes: list[int]) -> set[int]:
    """Those of `axes`, which cut dim `dim` before and after, on which some wanted piece and its holder differ."""
    found: set[int] = set()
    new, old = iter(_spans(after, dim)), iter(_spans(before, dim))
    wanted, held = next(new, None), next(old, None)
    while wanted is not None and held is not None:
        if max(wanted[0], held[0]) < min(wanted[1], held[1]):
            found.update(a for a in axes if wanted[2][a] != held[2][a])
            if len(found) == len(axes):
                break
        if wanted[1] <= held[1]:
            wanted = next(new, None)
        else:
            held = next(old, None)
    return found


def _spans(regions: Regions, dim: int) -> Iterable[tuple[int, int, list[int]]]:
    """Start, end and coordinate of each chunk of a dim that isn't empty, ascending."""
    order = regions.orders[dim]
    for place in itertools.product(*(range(regions.sizes[a]) for a in order)):
        coordinate = [0] * len(regions.sizes)
        for axis, at in zip(order, place):
            coordinate[axis] = at
        start, length = regions.span(dim, coordinate)
        if length:
            yield start, start + length, coordinate
