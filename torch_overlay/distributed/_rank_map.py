"""The ranks of a root mesh and all its views, a mesh universe: which rank sits at which index, and back.

Most meshes number their ranks 0 to n-1, and for those nothing is stored. A permutation, or a subset of the world, is
stored once and shared by the root mesh and all its views. Ranks are plain Python integers, so that looking one up
works under any tensor mode.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from array import array
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ._mesh_layout import _FlatLayout


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
            raise ValueError(f"ranks list must not contain duplicate entries, got {list(stored)}")

    @classmethod
    def identity(cls, numel: int) -> RankMap:
        """The ranks 0 to ``numel - 1`` in their own order, in constant time and space."""
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
        """Whether a greater index has a greater rank; as long as the map, once, unless it is the identity."""
        return self.is_identity or all(itertools.starmap(operator.lt, itertools.pairwise(self.ranks())))

    def ranks(self) -> Sequence[int]:
        """Every rank, in the order of the indices; a range for the identity."""
        return self._ranks

    @cached_property
    def key(self) -> tuple[int, str]:
        """A short value that is equal for equal maps, in this and in any other process."""
        if self.is_identity:
            return (self.numel, "")
        return (self.numel, hashlib.blake2b(array("q", self.ranks()).tobytes(), digest_size=16).hexdigest())

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
    """The ranks that one copy of a layout shows of another map, as a map of its own, made in constant time.

    Args:
        whole: the map to look at.
        layout: orthogonal; its coordinates become the indices of the window.
        start: the index of ``whole`` at which the copy starts.

    The second row of a 2 x 4 mesh; rank 0 is in the other row:

    >>> from ._mesh_layout import _FlatLayout
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
        return tuple(self._whole[self._start + offset] for offset in self._layout.all_ranks_from_zero())

    def ranks(self) -> Sequence[int]:
        return self._shown

    @property
    def is_identity(self) -> bool:
        return self._shown == tuple(range(self.numel))


def short(ranks: Sequence[int]) -> str:
    """Ranks for people, as briefly as they allow: from one to another, else all of them, else the first eight.

    >>> short([0, 1, 2, 3]), short([0, 8, 16, 24]), short([0, 4]), short([0, 1, 4, 5])
    ('0-3', '0-24 by 8', '0, 4', '0, 1, 4, 5')
    >>> short([rank * rank for rank in range(100)])
    '0, 1, 4, 9, 16, 25, 36, 49, … 9801 (100 ranks)'
    """
    count, step = len(ranks), ranks[1] - ranks[0] if len(ranks) > 2 else 0
    if step > 0 and all(map(operator.eq, ranks, itertools.count(ranks[0], step))):
        return f"{ranks[0]}-{ranks[-1]}" + ("" if step == 1 else f" by {step}")
    if count <= 16:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:8]))}, … {ranks[-1]} ({count} ranks)"


def of_ranks(ranks: Sequence[int]) -> str:
    """Ranks for people, with the word before them.

    >>> of_ranks([3]), of_ranks([0, 1, 2])
    ('rank 3', 'ranks 0-2')
    """
    return f"rank{'' if len(ranks) == 1 else 's'} {short(ranks)}"
