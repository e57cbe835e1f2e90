"""Which rank sits where in a mesh universe, and what a mesh shows of it: a rank map,
and layouts over it.

Most meshes number their ranks 0 to n-1, and for those nothing is stored. A permutation,
or a subset of the world, is stored once and shared by the root mesh and all its views.
Ranks are plain Python integers, so that looking one up works under any tensor mode.

A view is a layout over the rank map, a pure value. A layout says the indices of one
copy, and each rank sees the copy that it sits in. So one value stands for a mesh on all
ranks, and what a mesh answers is arithmetic on it. Coordinates and starts take the same
time at 64 ranks and at a million; a list of ranks takes as long as the copy has ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from .._mesh_layout import _FlatLayout, _MeshLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class RankMap:
    """From index to rank and back, both in constant time.

    Args:
        ranks: the rank at each index, without duplicates.

    Raises:
        ValueError: a rank stands there twice.

    >>> ranks = RankMap([3, 1, 2, 0])
    >>> ranks[0], ranks.index(3)  # rank 3 sits at index 0
    (3, 0)
    >>> RankMap(range(4)) == RankMap.identity(4)
    True
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        stored = tuple(ranks)
        self.numel = len(stored)
        self._ranks: Sequence[int] = range(self.numel)
        self._indices: dict[int, int] | None = None
        if stored == tuple(self._ranks):
            return
        self._ranks = stored
        self._indices = {rank: index for index, rank in enumerate(stored)}
        if len(self._indices) != self.numel:
            raise ValueError(
                f"ranks list must not contain duplicate entries, got {list(stored)}"
            )

    @classmethod
    def identity(cls, numel: int) -> RankMap:
        """The ranks 0 to ``numel - 1`` in their own order, in constant time and
        space."""
        made = cls(())
        made.numel = numel
        made._ranks = range(numel)
        return made

    @property
    def is_identity(self) -> bool:
        """Whether every rank sits at its own index."""
        return self._indices is None

    def __getitem__(self, index: int) -> int:
        return self._ranks[index]

    def index(self, rank: int) -> int | None:
        """Where ``rank`` sits, or None if the universe doesn't hold it."""
        if self._indices is None:
            return rank if 0 <= rank < self.numel else None
        return self._indices.get(rank)

    @cached_property
    def ascends(self) -> bool:  # overlay only
        """Whether a greater index has a greater rank; as long as the map, once, unless
        it is the identity."""
        return self.is_identity or all(
            itertools.starmap(operator.lt, itertools.pairwise(self.ranks()))
        )

    def ranks(self) -> Sequence[int]:
        """Every rank, in the order of the indices; a range for the identity."""
        return self._ranks

    @cached_property
    def key(self) -> tuple[int, str]:
        """A short value that is equal for equal maps, in this and in any other
        process."""
        if self.is_identity:
            return (self.numel, "")
        return (
            self.numel,
            hashlib.blake2b(
                array("q", self.ranks()).tobytes(), digest_size=16
            ).hexdigest(),
        )

    @cached_property
    def ranks_hash(self) -> int:  # overlay only
        """What the tuple of all ranks hashes to; as long as the map, once."""
        return hash(tuple(self.ranks()))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, RankMap) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"RankMap({self.ranks() if self.is_identity else list(self.ranks())})"


class Window(RankMap):
    """The ranks that one copy of a layout shows of another map, as a map of its own,
    made in constant time.

    Args:
        whole: the map to look at.
        layout: orthogonal; its coordinates become the indices of the window.
        start: the index of ``whole`` at which the copy starts.

    The second row of a 2 x 4 mesh; rank 0 is in the other row:

    >>> from .._mesh_layout import _FlatLayout
    >>> row = Window(RankMap.identity(8), _FlatLayout((4,)), 4)
    >>> row[1], row.index(5), row.index(0)
    (5, 1, None)
    """

    def __init__(self, whole: RankMap, layout: _FlatLayout, start: int) -> None:
        self.numel = layout.numel()
        self._whole = whole
        self._layout = layout
        self._start = start

    def __getitem__(self, index: int) -> int:
        return self._whole[self._start + self._layout(index)]

    def index(self, rank: int) -> int | None:
        index = self._whole.index(rank)
        if index is None:
            return None
        coordinate = self._layout.coordinate(index)
        return coordinate if index - self._layout(coordinate) == self._start else None

    @cached_property
    def _shown(self) -> tuple[int, ...]:
        return tuple(
            self._whole[self._start + offset]
            for offset in self._layout.all_ranks_from_zero()
        )

    def ranks(self) -> Sequence[int]:
        return self._shown

    @property
    def is_identity(self) -> bool:
        return self._shown == tuple(range(self.numel))


@dataclass(frozen=True, slots=True)
class View:
    """A layout over a rank map.

    Attributes:
        rank_map: shared by every view of one root.
        layout: from coordinates to indices, relative to the start of the copy that is
            seen.

    The inner axis of a 2 x 4 mesh has two copies, 0 to 3 and 4 to 7; rank 5 sits in the
    second:

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
        """The index at which the copy that ``rank`` sees starts; a rank outside the
        universe sees the first."""
        index = self.rank_map.index(rank)
        return 0 if index is None else self.layout.origin(index)

    def ranks(self, rank: int) -> list[int]:
        """Every rank of the copy that ``rank`` sees, row-major."""
        start = self.start(rank)
        if self.rank_map.is_identity and self.layout.collapse() == _FlatLayout(
            (self.layout.numel(),)
        ):
            return list(range(start, start + self.layout.numel()))
        return [
            self.rank_map[start + offset]
            for offset in self.layout.collapse().all_ranks_from_zero()
        ]

    def show(self, layout: _MeshLayout) -> View:
        """Another layout over the same ranks."""
        return View(self.rank_map, layout)

    def copies(self) -> list[int]:
        """The index at which each copy of the layout starts, over the whole rank
        map."""
        return (
            self.layout.collapse().complement(self.rank_map.numel).all_ranks_from_zero()
        )

    def window(self, layout: _MeshLayout, start: int) -> View:
        """The copy of ``layout`` at index ``start`` as a universe of its own: what
        another rank sees."""
        return View(
            Window(self.rank_map, layout.collapse(), start),
            _MeshLayout.from_sizes_strides(layout.top_level_sizes),
        )
