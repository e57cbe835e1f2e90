"""Before a group may be lacking."""

from __future__ import annotations

from functools import partial

from .exchanged import in_one


class Reduction(...):
    """The problem: reduce with `op` over `axes`, which are pending before and not after, and end in other boxes. All
    joint groups are at hand.

    Some methods are ways to do it; each gives beginnings of plans, all of them right. `best` chooses one of the plans.
    """

    def _ways(self) -> Ways:
        """Of plans that cost the same, that of the first way is taken."""
        return self.whole, self.part_whole, self.scattered, self.moved_first, partial(in_one, self)

    def _most_collectives(self) -> int:
        """As many as it takes one axis at a time, and no more than two."""
        return min(len(self.axes | misplaced(self.before, self.after)), 2)

    def part_whole(self) -> Iterator[Beginning]:
        """Reduce-scatter over the axes that cut the target, then all-reduce over the rest what is left of the data."""
        first = self.axes & self.after.sharded
        rest = self.axes - first
        if not (first and rest):
            return
        start = self.before.without_pending(first)
        cut = cut_toward(start, self.after, start.free)
        # Else the move after it would be a third collective.
        if cut.sharded.issuperset(first) and not crossed(cut, self.after):
            scattered = self._reduce_scatter(self.before, cut, first)
            yield (*scattered, *self.all_reduce(cut, cut, rest)), cut.without_pending(rest)

    def all_reduce(self, before: Regions, narrow: Regions, axes: frozenset[int]) -> Steps:
        """Of the part in `narrow`."""
        first = () if narrow == before else (Narrow(before, narrow),)
        return (*first, AllReduce(narrow, narrow.without_pending(axes), tuple(sorted(axes)), self.op))

    def _reduce_scatter(self, before: Regions, cut: Regions, axes: frozenset[int]) -> Steps:
        """To `cut`, which cuts `before` further by `axes` and maybe by free axes."""
        return (ReduceScatter(before, cut, tuple(sorted(axes)), self.op),)
