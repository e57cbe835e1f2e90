"""Reductions: pending values become values, in other boxes if the target asks. At most two collectives if the groups
are at hand: one that reduces, over all axes together, and one that moves. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._moves import Groups, crossed, move, push
from ._steps import AllReduce, AllToAll, Divide, Narrow, ReduceScatter, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._cost import Cost
    from ._regions import Regions

Steps = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Reduction:
    """The problem: reduce with `op` over `axes`, which are pending before and not after, and end in other boxes.

    Its methods are the ways to do it; each gives whole plans, all of them right. `best` takes the cheapest.
    """

    before: Regions
    after: Regions
    axes: frozenset[int]
    op: str
    groups: Groups
    itemsize: int
    cost: Cost

    def best(self) -> Steps:
        """The plan that the cost prefers."""
        if not crossed(self.before, self.after) and self.axes.isdisjoint(self.after.sharded):
            return next(self.whole())  # no plan can do with less
        for steps in self.scattered():
            if len(steps) == 1 and isinstance(steps[0], ReduceScatter) and self._exact(steps[0]):
                return steps  # each rank gets its own part and nothing else
            break
        # Of equals the first is taken: those that sum in the order in which torch's own plans do.
        ways = (self.whole, self.part_whole, self.scattered, self.moved_first, self.in_one)
        return self.cost.choose((plan for way in ways for plan in way()), self.itemsize)

    def _exact(self, step: ReduceScatter) -> bool:
        return step.before == self.before and step.ranks * step.chunk == self.before.most

    def whole(self) -> Iterator[Steps]:
        """All-reduce what every rank has, then move."""
        for narrow in self._narrowed():
            reduced = self._all_reduce(self.before, narrow, self.axes)
            yield (*reduced, *self._move(narrow.settled(self.axes)))

    def scattered(self) -> Iterator[Steps]:
        """Reduce-scatter, each rank keeping one part along all the axes, then move or gather the parts."""
        for narrow in self._narrowed():
            first = () if narrow == self.before else (Narrow(self.before, narrow),)
            for cut in dict.fromkeys(self._cuts(narrow)):
                yield (*first, *self._reduce_scatter(narrow, cut, self.axes), *self._move(cut))

    def part_whole(self) -> Iterator[Steps]:
        """Reduce-scatter over the axes that cut the target, then all-reduce over the rest what is left of the data."""
        first = self.axes & self.after.sharded
        rest = self.axes - first
        start = self.before.settled(first)
        cut = push(start, self.after, start.free)
        if not (first and rest and cut.sharded.issuperset(first)):
            return
        if not crossed(cut, self.after) or not self.groups.has(self.axes):  # else it would be a third collective
            scattered = self._reduce_scatter(self.before, cut, first)
            yield (*scattered, *self._all_reduce(cut, cut, rest), *self._move(cut.settled(rest)))

    def moved_first(self) -> Iterator[Steps]:
        """Move into boxes from which the target is a cut, then reduce there."""
        inner = self.before.cut(_until(order, self.axes) for order in self.after.orders)
        if not crossed(self.before, inner):
            return
        moved = move(self.before, inner, self.groups, self.itemsize, self.cost)
        if self.axes.issubset(self.after.sharded):
            yield (*moved, *self._reduce_scatter(inner, self.after, self.axes))
        else:
            yield (*moved, *self._all_reduce(inner, inner, self.axes), *self._move(inner.settled(self.axes)))

    def in_one(self) -> Iterator[Steps]:
        """One all-to-all that brings every rank all terms of what it wants; it adds them up itself."""
        around = self.groups.around(self.axes | crossed(self.before, self.after))
        if around is not None:
            reduced = tuple(sorted(self.axes))
            op, mean = (self.op, ()) if self.op != "avg" else ("sum", (Divide(self.groups.count(reduced)),))
            yield (AllToAll(self.before, self.after, around, op, reduced), *mean)

    def _move(self, now: Regions) -> Steps:
        return move(now, self.after, self.groups, self.itemsize, self.cost)

    def _narrowed(self) -> dict[Regions, None]:
        """What to reduce: only what the target wants of the local tensor, where it can be told; or all of it."""
        return dict.fromkeys((push(self.before, self.after, self.before.free), self.before))

    def _cuts(self, narrow: Regions) -> Iterator[Regions]:
        """Cuts of `narrow` along all the axes: where the target has them, the rest anywhere."""
        start = narrow.settled(self.axes)
        for allowed in (self.axes, start.free):
            cut = push(start, self.after, allowed)
            cut = _spread(cut, sorted(self.axes - cut.sharded))
            yield cut
        if len(self.axes) > 1 and cut.most * self.groups.count(self.axes) > narrow.most:
            # Padded, and by more than one axis after the other would be: all of them where there is least padding.
            yield _spread(start, sorted(self.axes))

    def _all_reduce(self, before: Regions, narrow: Regions, axes: frozenset[int]) -> list[Step]:
        steps: list[Step] = [] if narrow == before else [Narrow(before, narrow)]
        for group in self.groups.cover(axes):
            then = narrow.settled(group)
            steps.append(AllReduce(narrow, then, group, self.op))
            narrow = then
        return steps

    def _reduce_scatter(self, before: Regions, cut: Regions, axes: frozenset[int]) -> list[Step]:
        """To `cut`, which cuts `before` further by `axes` and maybe by free axes. Without the joint group it takes one
        group at a time, outer cuts first."""
        if not cut.sharded.issuperset(axes):  # a tensor without dims
            return self._all_reduce(before, before, axes)
        if self.groups.has(axes):
            return [ReduceScatter(before, cut, tuple(sorted(axes)), self.op)]
        steps: list[Step] = []
        while left := axes & before.pending:
            group, then = self._next_cut(before, cut, left)
            steps.append(ReduceScatter(before, then, group, self.op))
            before = then
        return steps if before == cut else [*steps, Narrow(before, cut)]

    def _next_cut(self, now: Regions, cut: Regions, left: frozenset[int]) -> tuple[tuple[int, ...], Regions]:
        for group in self.groups.within(left):
            then = push(now.settled(group), cut, now.free.union(group))
            if then.sharded.issuperset(group):
                return group, then
        raise AssertionError(f"none of the axes {sorted(left)} makes the next cut from {now} to {cut}")


def _until(order: tuple[int, ...], stops: frozenset[int]) -> tuple[int, ...]:
    depth = next((i for i, axis in enumerate(order) if axis in stops), len(order))
    return order[:depth]


def _spread(regions: Regions, axes: list[int]) -> Regions:
    """Cut further, by all these axes on the dim where the biggest box gets smallest; of equals the outermost."""
    if not axes or not regions.shape:
        return regions
    found = []
    for dim in range(len(regions.shape)):
        orders = list(regions.orders)
        orders[dim] += tuple(axes)
        found.append(regions.cut(orders))
    return min(found, key=lambda cut: cut.most)
