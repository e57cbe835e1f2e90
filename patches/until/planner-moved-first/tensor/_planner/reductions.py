"""Before a reduction in two parts, or after a move."""

from __future__ import annotations


class Reduction(...):
    def _ways(self) -> Ways:
        """Of plans that cost the same, that of the first way is taken."""
        return self.whole, self.scattered
