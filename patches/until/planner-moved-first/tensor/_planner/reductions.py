"""Before a reduction in two parts, or after a move."""

from __future__ import annotations


class Reduction(...):
    def _ways(self) -> Ways:
        """The ways, each with its place: of plans that cost the same, that of the least place is taken. The ways stand
        in another order, in which they are asked: those that bring few elements come first, so that most plans of the
        others are dropped by their beginnings."""
        return (1, self.scattered), (0, self.whole)
