"""Reductions: pending values become values, in other boxes if the target asks. At most two collectives if the groups
are at hand; the methods say which.

Scatters: how a reduction may leave its result in parts, a different one on each rank.

More ways to reduce: functions that begin plans for `Reduction`, as its methods do. They are apart from the class
since they need helpers and little of what it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from .cost import arriving_by, collectives
from .moves import all_to_alls, crossed, cut_toward, misplaced, move, next_collective
from .regions import Regions, common
from .senders import Exchange
from .steps import AllReduce, Divide, Narrow, ReduceScatter, Step

if TYPE_CHECKING:
    from .cost import Cost, Groups

# Of a cut by several axes: do those that cut the target come last, and do the pending ones come first?
_ORDERS = ((False, False), (False, True), (True, False), (True, True))


@dataclass(slots=True)
class Scatters:
    """Into which boxes a reduction over `axes` may cut its result on the way from `before` to `after`."""

    before: Regions
    after: Regions
    axes: frozenset[int]
    groups: Groups
    tried: set[int] = field(default_factory=set)  # the dims that some candidate cut

    def narrowed(self) -> tuple[Regions, ...]:
        """What to reduce: the part of the local tensor that the target wants; and the whole, so that axes which
        would cut the part are free to take part in the move."""
        narrow = cut_toward(self.before, self.after, self.before.free)
        return (narrow,) if narrow == self.before else (narrow, self.before)

    def cuts(self, narrow: Regions) -> Iterator[Regions]:
        """Different cuts of `narrow` along all the axes: where the target has them, the rest anywhere."""
        start = cut = narrow.without_pending(self.axes)
        found: list[Regions] = []
        for toward in dict.fromkeys([cut_toward(start, self.after, allowed) for allowed in (self.axes, start.free)]):
            cut = self.spread(toward, sorted(self.axes - toward.sharded))
            if cut not in found:
                found.append(cut)
                yield cut
        if len(self.axes) > 1 and cut.most * self.groups.count(self.axes) > narrow.most:
            # Padded: all the axes, if there are several, where there is least padding.
            cut = self.spread(start, sorted(self.axes))
            if cut not in found:
                found.append(cut)
                yield cut
        if not any(self.groups.has(crossed(cut, self.after)) for cut in found):
            yield from self.movable(start, self.axes)

    def _dims(self) -> list[int]:
        """The dims that source or target cut, then the others: where a dim that source or target cut divides evenly,
        the lengths of the others make no difference."""
        ends = self.before.orders, self.after.orders
        return sorted(range(len(self.before.shape)), key=lambda dim: not any(orders[dim] for orders in ends))

    def spread(self, regions: Regions, axes: list[int]) -> Regions:
        """Cut further, by all these axes on the dim where the biggest box gets smallest; of equals the first."""
        if not axes:
            return regions
        cuts, parts = [], self.groups.count(axes)
        for dim in self._dims():
            cuts.append(self._cut_on(regions, dim, axes))
            if regions.longest(dim) % parts == 0:
                return cuts[-1]  # evenly, so no box is smaller
        return min(cuts, key=lambda cut: cut.most)

    def movable(self, start: Regions, axes: frozenset[int]) -> Iterator[Regions]:
        """Different cuts of `start` along all these axes from which one collective leads on, with the groups at hand.
        Whose axes talk in it depends on the dim that they cut, and on their order there."""
        found: list[Regions] = []
        for (last, first), dim in itertools.product(_ORDERS, self._dims()):
            order = sorted(axes, key=lambda a: (last and a in self.after.sharded, first and a not in self.axes, a))
            cut = self._cut_on(start, dim, order)
            if cut not in found and self.groups.has(crossed(cut, self.after)):
                found.append(cut)
                yield cut

    def _cut_on(self, regions: Regions, dim: int, axes: list[int]) -> Regions:
        self.tried.add(dim)
        orders = regions.orders
        return regions.cut((*orders[:dim], orders[dim] + tuple(axes), *orders[dim + 1 :]))


Steps = tuple[Step, ...]
Beginning = tuple[Steps, Regions]  # how a plan begins, and where that leads; a move does the rest
Ways = tuple[Callable[[], Iterator[Beginning]], ...]


@dataclass(slots=True)
class Reduction:
    """The problem: reduce with `op` over `axes`, which are pending before and not after, and end in other boxes.

    Some methods are ways to do it; each gives beginnings of plans, all of them right. `best` chooses one of the plans.
    """

    before: Regions
    after: Regions
    axes: frozenset[int]
    op: str
    groups: Groups
    itemsize: int
    cost: Cost
    scatters: Scatters = field(init=False)
    crossed: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.scatters = Scatters(self.before, self.after, self.axes, self.groups)
        self.crossed = crossed(self.before, self.after)

    def best(self) -> Steps:
        """Of the plans that bring the fewest elements, the fastest. No other plan is made where the first can't be
        beaten: all-reduces and nothing moves, or one reduce-scatter, without padding, that leaves each rank what the
        target wants."""
        if self.axes.isdisjoint(self.after.sharded) and not self.crossed:
            return next(self._plans())
        if self.axes.issubset(self.after.sharded):
            head, now = next(self.scattered())
            if len(head) == 1 and now == self.after and isinstance(head[0], ReduceScatter) and self._exact(head[0]):
                return head
        plans = [(plan, arriving_by(plan)) for plan in self._plans()]
        most = min([elements for _, elements in plans])
        return self.cost.fastest([plan for plan, elements in plans if elements <= most], self.itemsize)

    def _plans(self) -> Iterator[Steps]:
        """Each way to begin, with the move that leads on from there."""
        most = self._most_collectives()
        for way in self._ways():
            for head, now in way():
                left = most - collectives(head)
                tail = move(now, self.after, self.groups, self.itemsize, self.cost, left)
                if collectives(tail) <= left:
                    yield (*head, *tail)

    def _ways(self) -> Ways:
        """Of plans that cost the same, that of the first way is taken."""
        return (
            self.whole,
            self.part_whole,
            self.scattered,
            self.moved_first,
            partial(in_one, self),
            partial(one_group_at_a_time, self),
            partial(exchanged, self),
        )

    def _most_collectives(self) -> int:
        """As many as it takes one axis at a time, and no more than two where one group has all that talk."""
        one_by_one = len(self.axes | misplaced(self.before, self.after))
        return min(one_by_one, 2) if self.groups.has(self.axes | self.crossed) else one_by_one

    def _exact(self, step: ReduceScatter) -> bool:
        return step.before == self.before and step.ranks * step.chunk == self.before.most

    def whole(self) -> Iterator[Beginning]:
        """All-reduce what every rank has, then move."""
        for narrow in self.scatters.narrowed():
            yield self.all_reduce(self.before, narrow, self.axes), narrow.without_pending(self.axes)

    def scattered(self) -> Iterator[Beginning]:
        """Reduce-scatter, each rank keeping one part along all the axes, then move or gather the parts."""
        for narrow in self.scatters.narrowed():
            first = () if narrow == self.before else (Narrow(self.before, narrow),)
            for cut in self.scatters.cuts(narrow):
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
        # Else the move after it would be a third collective.
        if not self.groups.has(self.axes) or not crossed(cut, self.after):
            scattered = self._reduce_scatter(self.before, cut, first)
            yield (*scattered, *self.all_reduce(cut, cut, rest)), cut.without_pending(rest)

    def moved_first(self) -> Iterator[Beginning]:
        """Move into boxes from which the target is a cut, then reduce there."""
        inner = self.before.cut([_until(order, self.axes) for order in self.after.orders])
        if not crossed(self.before, inner):
            return
        moved = move(self.before, inner, self.groups, self.itemsize, self.cost, self._most_collectives() - 1)
        if self.axes.issubset(self.after.sharded):
            yield (*moved, *self._reduce_scatter(inner, self.after, self.axes)), self.after
        else:
            yield (*moved, *self.all_reduce(inner, inner, self.axes)), inner.without_pending(self.axes)

    def all_reduce(self, before: Regions, narrow: Regions, axes: frozenset[int]) -> Steps:
        """Of the part in `narrow`, by as few groups as there are over these axes."""
        steps: list[Step] = [] if narrow == before else [Narrow(before, narrow)]
        for group in self.groups.cover(axes):
            then = narrow.without_pending(group)
            steps.append(AllReduce(narrow, then, group, self.op))
            narrow = then
        return tuple(steps)

    def _reduce_scatter(self, before: Regions, cut: Regions, axes: frozenset[int]) -> Steps:
        """To `cut`, which cuts `before` further by `axes` and maybe by free axes. Without the joint group it takes one
        group at a time, outer cuts first."""
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


def _until(order: tuple[int, ...], stops: frozenset[int]) -> tuple[int, ...]:
    """The order as far as it has none of these axes."""
    depth = next((i for i, axis in enumerate(order) if axis in stops), len(order))
    return order[:depth]


def in_one(asked: Reduction) -> Iterator[Beginning]:
    """One all-to-all that brings every rank all terms of what it wants; it adds them up itself. That is best where each
    rank wants little.

    For example, a (16, 16) tensor of 4-byte elements goes from R·S0·P to R·S1·S1 on (2, 2, 2). That is
    all_to_all(b,c) sum 384 B; without this function it would be reduce_scatter(c) 256 B, all_to_all(b,c) 192 B.
    """
    if asked.groups.has(asked.axes | asked.crossed):
        yield from _exchanges(asked, asked.after)


def _exchanges(asked: Reduction, then: Regions) -> Iterator[Beginning]:
    """All-to-alls to these boxes that bring each rank all terms. Those of an average are divided before they are sent:
    their sum may be more than a short floating-point number can be."""
    group, reduced = (tuple(sorted(axes)) for axes in (asked.axes | crossed(asked.before, then), asked.axes))
    op, mean = (asked.op, ()) if asked.op != "avg" else ("sum", (Divide(asked.groups.count(reduced)),))
    for step in all_to_alls(Exchange(asked.before, then, group, reduced), asked.before.free, asked.groups, op):
        yield (*mean, step), then


def one_group_at_a_time(asked: Reduction) -> Iterator[Beginning]:
    """Reduce-scatter as soon as the cut fits. Where none fits, all-reduce at once, or move on until one does; what
    doesn't cut the target is all-reduced in the end.

    For example, a (64, 64) tensor of 4-byte elements goes from P·P·S0 to S0·R·S1 on (2, 2, 2). Without joint groups
    that is all_to_all(c), reduce_scatter(a), all_reduce(b), 4096 B each.
    """
    if asked.groups.has(asked.axes | asked.crossed):
        return  # the other ways take no more than two
    for early in (True, False):
        steps: list[Step] = []
        now = asked.before
        while asked.axes & now.pending:
            made, now = _reduce_or_move(asked, now, early)
            steps += made
        yield tuple(steps), now


def _reduce_or_move(asked: Reduction, now: Regions, early: bool) -> Beginning:
    narrow = cut_toward(now, asked.after, now.free)
    first = () if narrow == now else (Narrow(now, narrow),)
    left = asked.axes & now.pending
    for group in asked.groups.within(left):
        then = cut_toward(narrow.without_pending(group), asked.after, narrow.free.union(group))
        if then.sharded.issuperset(group):
            return (*first, ReduceScatter(narrow, then, group, asked.op)), then
    if early or left.isdisjoint(asked.after.sharded):
        return (*first, *asked.all_reduce(narrow, narrow, left)), narrow.without_pending(left)
    made, then = next_collective(narrow, asked.after, asked.groups, asked.itemsize, asked.cost)
    return (*first, *made), then


def exchanged(asked: Reduction) -> Iterator[Beginning]:
    """Where only a group over all axes that talk is at hand: by that group, each rank gets all terms of a part that
    no other rank has, and adds them up itself; then the parts move.

    In the example of `one_group_at_a_time`, with all joint groups: reduce_scatter(a,b) 6144 B, all_to_all(a,b,c)
    4096 B. With the group over a, b and c alone: all_to_all(a,b,c) sum 8192 B, all_gather(b) 2048 B; `in_one` would
    bring 16384 B.
    """
    group = asked.axes | asked.crossed
    if asked.groups.has(asked.axes) or not asked.groups.has(group):
        return
    orders = zip(asked.before.orders, asked.after.orders)
    start = asked.before.cut([old[: common(old, new)] for old, new in orders]).without_pending(asked.axes)
    like = cut_toward(start, asked.after, start.free)
    first = asked.scatters.spread(like, sorted(group - like.sharded))
    for cut in dict.fromkeys((first, *asked.scatters.movable(start, group))):
        if asked.groups.has(asked.axes | crossed(asked.before, cut)):
            yield from _exchanges(asked, cut)
