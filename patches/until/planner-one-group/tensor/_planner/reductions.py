"""Before a reduction over the one group that contains all."""

from __future__ import annotations

from functools import partial

from .exchanged import in_one, one_group_at_a_time


class Reduction(...):
    def _ways(self) -> Ways:
        """Of plans that cost the same, that of the first way is taken."""
        return (
            self.whole,
            self.part_whole,
            self.scattered,
            self.moved_first,
            partial(in_one, self),
            partial(one_group_at_a_time, self),
        )
