"""Which rank has which index in a mesh universe (`RankMap`), and which of these ranks a
mesh shows (`View`, a layout over a rank map).

Most meshes number their ranks 0 to n-1, and for these nothing is stored. A permutation
or a subset of the world is stored once, and shared by the root mesh and all its views.
Ranks are plain Python ints, so looking one up works under any tensor mode.

A view is a pure value, equal on all ranks: its layout gives the indices of one copy,
and each rank sees the copy that it is in. All answers of a mesh are arithmetic on it.
Coordinates and starts take the same time for 64 ranks and for a million; a list of
ranks takes time in the size of the copy.
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
        ValueError: a rank occurs twice.

    >>> ranks = RankMap([3, 1, 2, 0])
    >>> ranks[0], ranks.index(3)  # rank 3 has index 0
    (3, 0)
    >>> RankMap(range(4)) == RankMap.identity(4)
    True
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        stored = tuple(ranks)
        self.numel = len(stored)
        self._ranks: Sequence[int] = range(self.numel)
        self._indices: dict[int, int] | None = None
        # Canonical at birth: a list that is the identity becomes the identity, so equal
        # maps have equal keys, and a million ranks in order take no memory.
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
        """The ranks 0 to ``numel - 1`` in order, in constant time and space."""
        rank_map = cls(())
        rank_map.numel = numel
        rank_map._ranks = range(numel)
        return rank_map

    @property
    def is_identity(self) -> bool:
        """True if the rank at each index is the index."""
        return self._indices is None

    def __getitem__(self, index: int) -> int:
        return self._ranks[index]

    def index(self, rank: int) -> int | None:
        """The index of ``rank``; None if the map doesn't hold it."""
        if self._indices is None:
            return rank if 0 <= rank < self.numel else None
        return self._indices.get(rank)

    @cached_property
    def ascends(self) -> bool:  # overlay only
        """True if ranks ascend. The first call looks at all ranks, unless it's the
        identity."""
        return self.is_identity or all(
            itertools.starmap(operator.lt, itertools.pairwise(self.ranks()))
        )

    def ranks(self) -> Sequence[int]:
        """Every rank, in the order of the indices. A range for the identity."""
        return self._ranks

    @cached_property
    def key(self) -> tuple[int, str]:
        """A short value that is equal for equal maps, also in other processes."""
        if self.is_identity:
            return (self.numel, "")
        # A digest, since the tuple itself may be a million ranks long, and meshes are
        # hashed and compared by this key all the time.
        return (
            self.numel,
            hashlib.blake2b(
                array("q", self.ranks()).tobytes(), digest_size=16
            ).hexdigest(),
        )

    @cached_property
    def ranks_hash(self) -> int:  # overlay only
        """The hash of the tuple of all ranks. The first call looks at all ranks."""
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
    """A rank map of the ranks that one copy of a layout shows of another map. It is
    made in constant time.

    Args:
        whole: the other map.
        layout: orthogonal. Its coordinates are the indices of the window.
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
        """The index of ``rank`` in the window; None if the window doesn't hold it."""
        index = self._whole.index(rank)
        if index is None:
            return None
        # Every index has a coordinate on the layout, but most are in another copy: in
        # this one only if taking the coordinate off leads back to its start.
        coordinate = self._layout.coordinate(index)
        return coordinate if index - self._layout(coordinate) == self._start else None

    @cached_property
    def _shown(self) -> tuple[int, ...]:
        """Every rank, in the order of the indices. The first call computes it."""
        # Computed on the first request: a window itself is made in constant time.
        return tuple(
            self._whole[self._start + offset]
            for offset in self._layout.all_ranks_from_zero()
        )

    def ranks(self) -> Sequence[int]:
        """Every rank of the window, in the order of its indices."""
        return self._shown

    @property
    def is_identity(self) -> bool:
        """True if each rank is its index. The first call computes all ranks."""
        # The window at the start of the world equals the identity map, so both must
        # have one `key`, and this decides whether the key has a digest.
        return self._shown == tuple(range(self.numel))


@dataclass(frozen=True, slots=True)
class View:
    """A layout over a rank map.

    Attributes:
        rank_map: shared by all views of one root mesh.
        layout: from coordinates to indices, relative to the start of a copy.

    The inner axis of a 2 x 4 mesh has two copies, 0 to 3 and 4 to 7. Rank 5 is in the
    second one:

    >>> tp = View(RankMap.identity(8), _MeshLayout.from_sizes_strides((4,)))
    >>> tp.start(5), tp.ranks(5), tp.coordinate(5)
    (4, [4, 5, 6, 7], (1,))
    """

    rank_map: RankMap
    layout: _MeshLayout

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The coordinates of ``rank``; None if the rank map doesn't hold it."""
        index = self.rank_map.index(rank)
        return None if index is None else self.layout.coordinate(index)

    def start(self, rank: int) -> int:
        """The index at which the copy that ``rank`` sees starts; 0 for a rank
        outside."""
        index = self.rank_map.index(rank)
        return 0 if index is None else self.layout.origin(index)

    def ranks(self, rank: int) -> list[int]:
        """The ranks of the copy that ``rank`` sees, row-major; outside, the first
        copy's."""
        start = self.start(rank)
        # The usual case of a dense axis, at the speed of a range.
        if self.rank_map.is_identity and self.layout.collapse() == _FlatLayout(
            (self.layout.numel(),)
        ):
            return list(range(start, start + self.layout.numel()))
        return [
            self.rank_map[start + offset]
            for offset in self.layout.collapse().all_ranks_from_zero()
        ]

    def with_layout(self, layout: _MeshLayout) -> View:
        return View(self.rank_map, layout)

    def copies(self) -> list[int]:
        """The index at which each copy of the layout starts."""
        return (
            self.layout.collapse().complement(self.rank_map.numel).all_ranks_from_zero()
        )

    def window(self, layout: _MeshLayout, start: int) -> View:
        """The copy of an orthogonal ``layout`` at index ``start``, as a view of a rank
        map of its own. A rank of another copy passes another ``start``."""
        return View(
            Window(self.rank_map, layout.collapse(), start),
            _MeshLayout.from_sizes_strides(layout.top_level_sizes),
        )
