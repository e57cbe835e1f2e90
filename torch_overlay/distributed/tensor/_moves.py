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

from ._cost import arriving_by
from ._steps import AllGather, AllToAll, Narrow, Step

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ._cost import Cost
    from ._regions import Regions

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

    def around(self, axes: Collection[int]) -> tuple[int, ...] | None:
        """The smallest group over at least these axes, or None."""
        if self.has(axes):
            return tuple(sorted(axes))
        wider = [group for group in self.axes or () if set(axes).issubset(group)]
        return min(wider, key=lambda group: (self.count(group), group), default=None)

    def count(self, axes: Iterable[int]) -> int:
        """How many ranks a group over these axes has."""
        return math.prod(self.sizes[a] for a in axes)

    def within(self, axes: Collection[int]) -> list[tuple[int, ...]]:
        """All groups over some of these axes, the biggest first."""
        joint = [tuple(sorted(axes))] if self.axes is None else [g for g in self.axes if set(g).issubset(axes)]
        found = {*joint, *((a,) for a in axes)}
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
        plans.append(_by_turns(before, after, groups, itemsize, cost))
    elif cost.axes and len(axes) > 1:
        # A joint group is as slow as its slowest axis. More collectives that bring no more may be faster.
        most = min(map(arriving_by, plans))
        turns = [_by_turns(before, after, groups, itemsize, cost, parts) for parts in cost.by_speed(axes)]
        plans += [plan for plan in turns if arriving_by(plan) <= most]
    return cost.fastest(plans, itemsize)


def _at_once(before: Regions, after: Regions, axes: frozenset[int], groups: Groups) -> Iterable[tuple[Step, ...]]:
    # Narrowing is a view, and what is left is cut by the group alone.
    narrow = push(before, after, before.free)
    first = () if narrow == before else (Narrow(before, narrow),)
    inner = all(old[: len(new)] == new for old, new in zip(narrow.orders, after.orders))
    if inner and groups.has(axes):
        gather = AllGather(narrow, after, tuple(sorted(axes)))
        yield (*first, gather)
        if gather.ranks * gather.chunk == after.most:
            return  # no padding: an all-to-all would bring the same
    around = groups.around(axes)
    if around is not None:
        yield (*first, AllToAll(narrow, after, around))


def _by_turns(
    before: Regions, after: Regions, groups: Groups, itemsize: int, cost: Cost, parts: Parts = ()
) -> tuple[Step, ...]:
    """One group at a time: from the inside out, give up the cuts that the target doesn't have, and make those that it
    has as soon as they fit. With `parts`, only by groups within one of these sets of axes, the first set first."""
    steps: list[Step] = []
    now = before
    while crossed(now, after):
        then = _turn(now, after, groups, parts)
        axes = crossed(now, then)
        steps += cost.fastest(list(_at_once(now, then, axes, groups)), itemsize) if axes else (Narrow(now, then),)
        now = then
    return (*steps, *(() if now == after else (Narrow(now, after),)))


def _turn(now: Regions, after: Regions, groups: Groups, parts: Parts) -> Regions:
    # By the group that gives up most cuts; of equals the smallest.
    wrong = sorted({a for old, new in zip(now.orders, after.orders) for a in old[common(old, new) :]})
    usable = (*(groups.axes or ()), *((axis,) for axis in wrong))
    given_up = {group: _without(now, after, group) for group in usable}
    for part in parts:
        whole = tuple(axis for axis in wrong if axis in part)
        within = [g for g in (whole, *given_up) if g and part.issuperset(g) and groups.has(g)]
        first = {group: _without(now, after, group) for group in within}
        if first := {group: then for group, then in first.items() if then != now}:
            given_up = first
            break
    group = min(given_up, key=lambda g: (len(given_up[g].sharded), groups.count(g), g))
    popped = given_up[group]
    if popped == now:
        raise AssertionError(f"{now} to {after} crosses {wrong}, but none of these cuts is the innermost of its dim")
    return push(popped, after, popped.free)


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
