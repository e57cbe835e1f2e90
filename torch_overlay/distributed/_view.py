"""A view: the part of a mesh universe that one mesh shows, as a pure value.

A view is a layout over the universe's rank map, and it knows where it starts: normally at the copy of the layout that
holds the current rank, for a mesh at another coordinate at an index of its own. All of a mesh's bookkeeping is
arithmetic on this value and costs the same at 64 ranks and at a million. The room imports the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ._layout import Ints, Layout, MeshLayout
from ._rank_map import RankMap


@dataclass(frozen=True, slots=True)
class View:
    """A layout over a rank map, with the index at which it starts.

    Attributes:
        rank_map: shared by every view of one root.
        layout: from coordinates to indices, relative to ``base``.
        base: the index of the view's first element; None for "the copy that holds the rank who asks".
    """

    rank_map: RankMap
    layout: MeshLayout
    base: int | None = None

    def coordinate(self, rank: int) -> Ints | None:
        """The coordinates of ``rank``, or None if this view doesn't hold it."""
        index = self.rank_map.index(rank)
        if index is None or (self.base is not None and self.layout.origin(index) != self.base):
            return None
        return self.layout.coordinate(index)

    def origin(self, rank: int) -> int:
        """The index of the first element as ``rank`` sees it; a rank outside the universe sees the first copy."""
        if self.base is not None:
            return self.base
        index = self.rank_map.index(rank)
        return 0 if index is None else self.layout.origin(index)

    def ranks(self, rank: int) -> list[int]:
        """Every rank of the view as ``rank`` sees it, row-major."""
        origin = self.origin(rank)
        return [self.rank_map[origin + offset] for offset in self.layout.joint().indices()]

    def at(self, base: int) -> View:
        """The same layout starting at index ``base``."""
        return replace(self, base=base)

    def show(self, layout: MeshLayout) -> View:
        """Another layout over the same ranks, starting where this one does."""
        return replace(self, layout=layout)

    def copies(self, axis: Layout) -> list[int]:
        """The index at which each copy of ``axis`` starts, over the whole rank map."""
        return axis.complement(self.rank_map.numel).indices()
