"""Reductions: pending values become values, in other boxes if the target asks. At most two collectives if the groups
are at hand: one that reduces, over all axes together, and one that moves. Standard library only.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .cost import arriving_by, collectives, least_overlap
from .moves import all_to_alls, common, crossed, cut_toward, misplaced, move, next_collective
from .regions import Regions
from .senders import Exchange
from .steps import AllReduce, Divide, Narrow, ReduceScatter, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .cost import Cost
    from .groups import Groups

Steps = tuple[Step, ...]
Beginning = tuple[Steps, Regions]  # how a plan begins, and where that leads; a move does the rest

_ORDERS = tuple(itertools.product((False, True), repeat=2))  # axes that cut the target last, pending axes first


@dataclass(slots=True)
class Reduction:
    """The problem: reduce with `op` over `axes`, which are pending before and not after, and end in other boxes.

    Some methods are ways to do it; each gives beginnings of plans, all of them right. `best` takes the cheapest.
    """

    before: Regions
    after: Regions
    axes: frozenset[int]
    op: str
    groups: Groups
    itemsize: int
    cost: Cost
    tried: set[int]  # the dims that it was tried to cut where the target doesn't
    _crossed: frozenset[int] = field(init=False)
    _moves: dict[tuple[Regions, int], tuple[Steps, int]] = field(default_factory=dict)
    _least: float = math.inf  # the elements of the leanest plan so far

    def __post_init__(self) -> None:
        self._crossed = crossed(self.before, self.after)

    def best(self) -> Steps:
        """The plan that the cost prefers."""
        if self.axes.isdisjoint(self.after.sharded) and not self._crossed:
            head, now = next(self.whole())
            return (*head, *self._move(now, 0)[0])  # no plan can do with less
        if self.axes.issubset(self.after.sharded):
            head, now = next(self.scattered())
            if len(head) == 1 and now == self.after and isinstance(head[0], ReduceScatter) and self._exact(head[0]):
                return head  # each rank gets its own part and nothing else
        return self.cost.fastest(self._lean(), self.itemsize)

    def _lean(self) -> list[Steps]:
        """The plans that bring so few elements that the cost looks at them. Of equals the first is taken: those that
        sum in the order of the steps one by one."""
        found = []
        most = self._most_collectives()
        # The lean ways are asked first, so that most of the others are known to bring too much by their beginnings.
        ways = (
            (2, self.scattered),
            (1, self.part_whole),
            (3, self.moved_first),
            (0, self.whole),
            (5, self.exchanged),
            (6, self.one_group_at_a_time),
            (4, self.in_one),
        )
        for place, way in ways:
            for head, now in way():
                elements = arriving_by(head)
                if self._too_many(elements + _lacked(now, self.after)):
                    continue
                left = most - collectives(head)
                tail, more = self._move(now, left)
                if collectives(tail) <= left:
                    found.append((elements + more, place, (*head, *tail)))
                    self._least = min(self._least, elements + more)
        found.sort(key=lambda one: one[1])
        return [plan for elements, _, plan in found if not self._too_many(elements)]

    def _most_collectives(self) -> int:
        """As many as it takes one axis at a time, and no more than two where one group has all that talk."""
        apart = len(self.axes | misplaced(self.before, self.after))
        return min(apart, 2) if self.groups.has(self.axes | self._crossed) else apart

    def _too_many(self, elements: int) -> bool:
        return elements > self._least * self.cost.thrift

    def _exact(self, step: ReduceScatter) -> bool:
        return step.before == self.before and step.ranks * step.chunk == self.before.most

    def whole(self) -> Iterator[Beginning]:
        """All-reduce what every rank has, then move."""
        for narrow in self._narrowed():
            yield self._all_reduce(self.before, narrow, self.axes), narrow.without_pending(self.axes)

    def scattered(self) -> Iterator[Beginning]:
        """Reduce-scatter, each rank keeping one part along all the axes, then move or gather the parts."""
        for narrow in self._narrowed():
            first = () if narrow == self.before else (Narrow(self.before, narrow),)
            for cut in self._cuts(narrow):
                yield (*first, *self._reduce_scatter(narrow, cut, self.axes)), cut

    def part_whole(self) -> Iterator[Beginning]:
        """Reduce-scatter over the axes that cut the target, then all-reduce over the rest what is left of the data."""
        first = self.axes & self.after.sharded
        rest = self.axes - first
        if not (first and rest):
            return
        start = self.before.without_pending(first)
        cut = cut_toward(start, self.after, start.free)
        if not cut.sharded.issuperset(first):
            return
        if not self.groups.has(self.axes) or not crossed(cut, self.after):  # else it would be a third collective
            scattered = self._reduce_scatter(self.before, cut, first)
            yield (*scattered, *self._all_reduce(cut, cut, rest)), cut.without_pending(rest)

    def moved_first(self) -> Iterator[Beginning]:
        """Move into boxes from which the target is a cut, then reduce there."""
        inner = self.before.cut([_until(order, self.axes) for order in self.after.orders])
        scattered, terms = self.axes.issubset(self.after.sharded), self.groups.count(self.axes)
        reduced = (terms - 1) * (self.after.most if scattered else 2 * inner.most // terms)
        if self._too_many(reduced + _lacked(self.before, inner)) or not crossed(self.before, inner):
            return
        moved = move(self.before, inner, self.groups, self.itemsize, self.cost, self._most_collectives() - 1)
        if scattered:
            yield (*moved, *self._reduce_scatter(inner, self.after, self.axes)), self.after
        else:
            yield (*moved, *self._all_reduce(inner, inner, self.axes)), inner.without_pending(self.axes)

    def one_group_at_a_time(self) -> Iterator[Beginning]:
        """Reduce-scatter as soon as the cut fits. Where none fits, all-reduce the `early` axes, else move on until one
        does; what doesn't cut the target is all-reduced in the end."""
        if self.groups.has(self.axes | self._crossed):
            return  # the other ways take no more than two
        for early in dict.fromkeys((self.axes, self.axes - self.after.sharded, frozenset[int]())):
            steps: list[Step] = []
            now = self.before
            while self.axes & now.pending:
                made, now = self._next_collective(now, early)
                steps += made
            yield tuple(steps), now

    def _next_collective(self, now: Regions, early: frozenset[int]) -> Beginning:
        narrow = cut_toward(now, self.after, now.free)
        first = () if narrow == now else (Narrow(now, narrow),)
        left = self.axes & now.pending
        for group in self.groups.within(left):
            then = cut_toward(narrow.without_pending(group), self.after, narrow.free.union(group))
            if then.sharded.issuperset(group):
                return (*first, ReduceScatter(narrow, then, group, self.op)), then
        reduced = left if left.isdisjoint(self.after.sharded) else left & early
        if reduced:
            return (*first, *self._all_reduce(narrow, narrow, reduced)), narrow.without_pending(reduced)
        made, then = next_collective(narrow, self.after, self.groups, self.itemsize, self.cost)
        return (*first, *made), then

    def exchanged(self) -> Iterator[Beginning]:
        """Where only a group over all axes that talk is at hand: by that group, each rank gets all terms of a part that
        no other rank has, and adds them up itself; then the parts move."""
        group = self.axes | self._crossed
        if self.groups.has(self.axes) or not self.groups.has(group):
            return
        orders = zip(self.before.orders, self.after.orders)
        start = self.before.cut([old[: common(old, new)] for old, new in orders]).without_pending(self.axes)
        like = cut_toward(start, self.after, start.free)
        cuts = [self._spread(like, sorted(group - like.sharded)), *self._movable(start, group)]
        for cut in dict.fromkeys(cuts):
            if self.groups.has(self.axes | crossed(self.before, cut)):
                yield from self._exchanges(cut)

    def in_one(self) -> Iterator[Beginning]:
        """One all-to-all that brings every rank all terms of what it wants; it adds them up itself."""
        arriving = self.groups.count(self.axes) * self.after.most - least_overlap(self.before, self.after)
        if not self._too_many(arriving) and self.groups.has(self.axes | self._crossed):
            yield from self._exchanges(self.after)

    def _exchanges(self, then: Regions) -> Iterator[Beginning]:
        """All-to-alls to these boxes that bring each rank all terms."""
        group, reduced = (tuple(sorted(axes)) for axes in (self.axes | crossed(self.before, then), self.axes))
        op, mean = (self.op, ()) if self.op != "avg" else ("sum", (Divide(self.groups.count(reduced)),))
        for step in all_to_alls(Exchange(self.before, then, group, reduced), self.before.free, self.groups, op):
            yield (step, *mean), then

    def _move(self, now: Regions, limit: int) -> tuple[Steps, int]:
        """How to go on from there, by no more collectives if that can be; the elements that it brings."""
        found = self._moves.get((now, limit))
        if found is None:
            steps = move(now, self.after, self.groups, self.itemsize, self.cost, limit)
            found = self._moves[now, limit] = steps, arriving_by(steps)
        return found

    def _narrowed(self) -> tuple[Regions, ...]:
        """What to reduce: only what the target wants of the local tensor, where it can be told; or all of it."""
        narrow = cut_toward(self.before, self.after, self.before.free)
        return (narrow,) if narrow == self.before else (narrow, self.before)

    def _cuts(self, narrow: Regions) -> Iterator[Regions]:
        """Different cuts of `narrow` along all the axes: where the target has them, the rest anywhere."""
        start = narrow.without_pending(self.axes)
        found: list[Regions] = []
        for toward in dict.fromkeys([cut_toward(start, self.after, allowed) for allowed in (self.axes, start.free)]):
            cut = self._spread(toward, sorted(self.axes - toward.sharded))
            if cut not in found:
                found.append(cut)
                yield cut
        if len(self.axes) > 1 and cut.most * self.groups.count(self.axes) > narrow.most:
            # Padded, and by more than one axis after the other would be: all of them where there is least padding.
            cut = self._spread(start, sorted(self.axes))
            if cut not in found:
                found.append(cut)
                yield cut
        if not any(self.groups.has(crossed(cut, self.after)) for cut in found):
            yield from self._movable(start, self.axes)

    def _dims(self) -> list[int]:
        """The dims that source or target cut, then the others: so that it makes no difference how evenly these can be
        cut, where those can."""
        ends = self.before.orders, self.after.orders
        return sorted(range(len(self.before.shape)), key=lambda dim: not any(orders[dim] for orders in ends))

    def _spread(self, regions: Regions, axes: list[int]) -> Regions:
        """Cut further, by all these axes on the dim where the biggest box gets smallest; of equals the first."""
        if not axes or not regions.shape:
            return regions
        cuts, parts = [], self.groups.count(axes)
        for dim in self._dims():
            cuts.append(self._cut_on(regions, dim, axes))
            if regions.longest(dim) % parts == 0:
                return cuts[-1]  # evenly, so no box is smaller
        return min(cuts, key=lambda cut: cut.most)

    def _movable(self, start: Regions, axes: frozenset[int]) -> Iterator[Regions]:
        """Cuts of `start` along all these axes from which one collective leads on, with the groups at hand. Whose axes
        talk in it depends on the dim that they cut, and on their order there."""
        for (last, first), dim in itertools.product(_ORDERS, self._dims()):
            order = sorted(axes, key=lambda a: (last and a in self.after.sharded, first and a not in self.axes, a))
            cut = self._cut_on(start, dim, order)
            if self.groups.has(crossed(cut, self.after)):
                yield cut

    def _cut_on(self, regions: Regions, dim: int, axes: list[int]) -> Regions:
        self.tried.add(dim)
        orders = regions.orders
        return regions.cut((*orders[:dim], orders[dim] + tuple(axes), *orders[dim + 1 :]))

    def _all_reduce(self, before: Regions, narrow: Regions, axes: frozenset[int]) -> Steps:
        steps: list[Step] = [] if narrow == before else [Narrow(before, narrow)]
        for group in self.groups.cover(axes):
            then = narrow.without_pending(group)
            steps.append(AllReduce(narrow, then, group, self.op))
            narrow = then
        return tuple(steps)

    def _reduce_scatter(self, before: Regions, cut: Regions, axes: frozenset[int]) -> Steps:
        """To `cut`, which cuts `before` further by `axes` and maybe by free axes. Without the joint group it takes one
        group at a time, outer cuts first."""
        if not cut.sharded.issuperset(axes):  # a tensor without dims
            return self._all_reduce(before, before, axes)
        if self.groups.has(axes):
            return (ReduceScatter(before, cut, tuple(sorted(axes)), self.op),)
        steps: list[Step] = []
        while left := axes & before.pending:
            group, then = self._next_cut(before, cut, left)
            steps.append(ReduceScatter(before, then, group, self.op))
            before = then
        return tuple(steps) if before == cut else (*steps, Narrow(before, cut))

    def _next_cut(self, now: Regions, cut: Regions, left: frozenset[int]) -> tuple[tuple[int, ...], Regions]:
        for group in self.groups.within(left):
            then = cut_toward(now.without_pending(group), cut, now.free.union(group))
            if then.sharded.issuperset(group):
                return group, then
        raise AssertionError(f"none of the axes {sorted(left)} makes the next cut from {now} to {cut}")


def _lacked(now: Regions, then: Regions) -> int:
    """The elements that any plan from these boxes to those brings, at least: what the rank at coordinate 0 lacks, which
    has the first and biggest chunk of each dim."""
    both = [(now.longest(dim), then.longest(dim)) for dim in range(len(then.shape))]
    return math.prod([wanted for _, wanted in both]) - math.prod([min(pair) for pair in both])


def _until(order: tuple[int, ...], stops: frozenset[int]) -> tuple[int, ...]:
    depth = next((i for i, axis in enumerate(order) if axis in stops), len(order))
    return order[:depth]
