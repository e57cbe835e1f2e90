"""Scatters: how a reduction may leave its result in parts, a different one on each rank."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .moves import crossed, cut_toward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .groups import Groups
    from .regions import Regions

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
