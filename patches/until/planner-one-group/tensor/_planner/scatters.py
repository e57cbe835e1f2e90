"""Before a reduction over the one group that contains all."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .regions import Regions


class Scatters(...):
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
                yield cut
