"""Before reductions over one group after the other."""

from __future__ import annotations

from functools import partial

from .exchanged import exchanged, in_one


class Reduction(...):
    def _ways(self) -> Ways:
        """Of plans that cost the same, that of the first way is taken."""
        ways = self.whole, self.part_whole, self.scattered, self.moved_first
        return (*ways, partial(in_one, self), partial(exchanged, self))

    def _reduce_scatter(self, before: Regions, cut: Regions, axes: frozenset[int]) -> Steps:
        """To `cut`, which cuts `before` further by `axes` and maybe by free axes."""
        return (ReduceScatter(before, cut, tuple(sorted(axes)), self.op),)
