"""What a mesh shows of the ranks of its root: a layout over their rank map, as a pure value.

A layout says the indices of one copy, and each rank sees the copy that it sits in. So one value stands for a mesh on
all ranks, and what a mesh answers is arithmetic on it. Coordinates and starts take the same time at 64 ranks and at a
million; a list of ranks takes as long as the copy has ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._mesh_layout import _FlatLayout, _MeshLayout
from ._rank_map import RankMap, Window


@dataclass(frozen=True, slots=True)
class View:
    """A layout over a rank map.

    Attributes:
        rank_map: shared by every view of one root.
        layout: from coordinates to indices, relative to the start of the copy that is seen.

    The inner axis of a 2 x 4 mesh has two copies, 0 to 3 and 4 to 7; rank 5 sits in the second:

    >>> tp = View(RankMap.identity(8), _MeshLayout.from_sizes_strides((4,)))
    >>> tp.start(5), tp.ranks(5), tp.coordinate(5)
    (4, [4, 5, 6, 7], (1,))
    """

    rank_map: RankMap
    layout: _MeshLayout

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The coordinates of ``rank``, or None if the universe doesn't hold it."""
        index = self.rank_map.index(rank)
        return None if index is None else self.layout.coordinate(index)

    def start(self, rank: int) -> int:
        """The index at which the copy that ``rank`` sees starts; a rank outside the universe sees the first."""
        index = self.rank_map.index(rank)
        return 0 if index is None else self.layout.origin(index)

    def ranks(self, rank: int) -> list[int]:
        """Every rank of the copy that ``rank`` sees, row-major."""
        start = self.start(rank)
        if self.rank_map.is_identity and self.layout.collapse() == _FlatLayout((self.layout.numel(),)):
            return list(range(start, start + self.layout.numel()))
        return [self.rank_map[start + offset] for offset in self.layout.collapse().all_ranks_from_zero()]

    def show(self, layout: _MeshLayout) -> View:
        """Another layout over the same ranks."""
        return View(self.rank_map, layout)

    def copies(self) -> list[int]:
        """The index at which each copy of the layout starts, over the whole rank map."""
        return self.layout.collapse().complement(self.rank_map.numel).all_ranks_from_zero()

    def window(self, layout: _MeshLayout, start: int) -> View:
        """The copy of ``layout`` at index ``start`` as a universe of its own: what another rank sees."""
        return View(
            Window(self.rank_map, layout.collapse(), start), _MeshLayout.from_sizes_strides(layout.top_level_sizes)
        )
