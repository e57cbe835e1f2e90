"""Reductions: pending values become values, in other boxes if the target asks. At most two collectives if the groups
are at hand; the methods say which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from .cost import arriving_by, collectives
from .exchanged import exchanged, in_one, one_group_at_a_time
from .moves import crossed, cut_toward, misplaced, move
from .regions import Regions
from .scatters import Scatters
from .steps import AllReduce, Narrow, ReduceScatter, Step

if TYPE_CHECKING:
    from .cost import Cost
    from .groups import Groups

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
        most = min([elements for _, elements in plans]) * self.cost.thrift
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
        apart = len(self.axes | misplaced(self.before, self.after))
        return min(apart, 2) if self.groups.has(self.axes | self.crossed) else apart

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
