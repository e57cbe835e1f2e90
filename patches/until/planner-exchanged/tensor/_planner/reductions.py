"""Before reductions by all-to-alls, and one group at a time."""

from __future__ import annotations


class Reduction(...):
    def _ways(self) -> Ways:
        """The ways, each with its place: of plans that cost the same, that of the least place is taken. The ways stand
        in another order, in which they are asked: those that bring few elements come first, so that most plans of the
        others are dropped by their beginnings."""
        return (2, self.scattered), (1, self.part_whole), (3, self.moved_first), (0, self.whole)

    def _reduce_scatter(self, before: Regions, cut: Regions, axes: frozenset[int]) -> Steps:
        """To `cut`, which cuts `before` further by `axes` and maybe by free axes."""
        if not cut.sharded.issuperset(axes):  # a tensor without dims
            return self.all_reduce(before, before, axes)
        return (ReduceScatter(before, cut, tuple(sorted(axes)), self.op),)
