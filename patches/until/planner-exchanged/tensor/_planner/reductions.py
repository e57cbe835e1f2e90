"""Before reductions by all-to-alls."""

from __future__ import annotations


class Reduction(...):
    def _ways(self) -> Ways:
        """Of plans that cost the same, that of the first way is taken."""
        return self.whole, self.part_whole, self.scattered, self.moved_first
