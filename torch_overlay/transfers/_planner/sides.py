"""`Side`: one tensor on one mesh, as ranks and boxes. A move has two sides, its source and its target.

Standard library only.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ...distributed.tensor._planner.regions import Box, Regions

Coordinate = tuple[int, ...]  # of a rank in a mesh, one number for each axis


class Ranks:
    """Which rank stands at each coordinate of a mesh, or of a slice of a mesh. Hashable, and compared by value.

    Args:
        ranks: row-major over the coordinates.
        ranges: for each axis its coordinates: all of them, or the single one of a slice.

    Raises:
        ValueError: there are more or fewer ranks than coordinates, or a rank stands twice.
    """

    __slots__ = ("_hash", "_met", "_places", "_strides", "ranges", "ranks")

    def __init__(self, ranks: Iterable[int], ranges: Iterable[range]) -> None:
        self.ranks, self.ranges = tuple(ranks), tuple(ranges)
        if math.prod(map(len, self.ranges)) != len(self.ranks):
            raise ValueError(f"{len(self.ranks)} ranks for coordinates in {self.ranges}")
        self._places = {rank: place for place, rank in enumerate(self.ranks)}
        if len(self._places) != len(self.ranks):
            raise ValueError(f"a rank stands twice in {self.ranks}")
        # Row-major over the coordinates that take part, so that a slice needs no table of coordinates.
        strides = [1]
        for coordinates in reversed(self.ranges[1:]):
            strides.append(strides[-1] * len(coordinates))
        self._strides = tuple(reversed(strides))
        self._met: dict[Ranks, bool] = {}
        self._hash = hash((self.ranks, self.ranges))

    @staticmethod
    def of(ranks: Iterable[int], sizes: Iterable[int]) -> Ranks:
        """Return the ranks of a whole mesh."""
        return Ranks(ranks, map(range, sizes))

    def at(self, coordinate: Sequence[int]) -> int:
        """Return the rank at a coordinate, which is one of `ranges`."""
        place = 0
        for at, stride, coordinates in zip(coordinate, self._strides, self.ranges):
            place += (at - coordinates.start) * stride
        return self.ranks[place]

    def coordinate(self, rank: int) -> Coordinate | None:
        """Return the coordinate of a rank; None if the mesh doesn't have it."""
        place = self._places.get(rank)
        if place is None:
            return None
        coordinate = []
        for stride, coordinates in zip(self._strides, self.ranges):
            coordinate.append(coordinates.start + place // stride % len(coordinates))
        return tuple(coordinate)

    def meets(self, other: Ranks) -> bool:
        """True if some rank is in both. Remembered, since a model has many tensors and few meshes."""
        meets = self._met.get(other)
        if meets is None:
            meets = self._met[other] = not self._places.keys().isdisjoint(other._places)
        return meets

    def same_set(self, other: Ranks) -> bool:
        """True if both have the same ranks, in whatever order."""
        return self._places.keys() == other._places.keys()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Ranks) and (self.ranks, self.ranges) == (other.ranks, other.ranges)

    def __hash__(self) -> int:
        return self._hash


class Side(NamedTuple):
    """Which rank of a mesh holds which box of one tensor.

    A rank's box follows from its coordinates on the axes that shard the tensor. Ranks that differ only on other axes
    hold the same box, and are replicas of one another. A cell is a box that some rank holds, named by the coordinate of
    its first replica, which is at the start of every other axis.
    """

    regions: Regions
    ranks: Ranks

    def box(self, coordinate: Coordinate) -> Box:
        """Return the box of the whole tensor that the rank at a coordinate holds."""
        return self.regions.box(coordinate)

    def cell(self, coordinate: Coordinate) -> Coordinate:
        """Return the cell of a coordinate: that of the first replica that holds the same box."""
        cut, ranges = self.regions.sharded, self.ranks.ranges
        return tuple([at if axis in cut else ranges[axis].start for axis, at in enumerate(coordinate)])

    def cells(self) -> Iterator[Coordinate]:
        """Return an iterator over the coordinates of all cells, row-major, also those of empty boxes, as the last ranks
        of a short dim have."""
        cut = self.regions.sharded
        # On an axis of replicas only the first coordinate: at the others are the same boxes.
        ranges = [r if axis in cut else r[:1] for axis, r in enumerate(self.ranks.ranges)]
        return itertools.product(*ranges)

    @property
    def replica_axes(self) -> tuple[int, ...]:
        """The axes along which ranks are replicas: those of more than one rank that don't shard the tensor."""
        cut = self.regions.sharded
        return tuple([axis for axis, r in enumerate(self.ranks.ranges) if len(r) > 1 and axis not in cut])

    @property
    def replicas(self) -> int:
        """How many ranks hold each cell."""
        return math.prod([len(self.ranks.ranges[axis]) for axis in self.replica_axes])

    def replica(self, coordinate: Coordinate) -> int:
        """Return the number of the rank at a coordinate among the replicas of its cell, from 0."""
        number = 0
        for axis in self.replica_axes:
            coordinates = self.ranks.ranges[axis]
            number = number * len(coordinates) + coordinate[axis] - coordinates.start
        return number

    def holder(self, cell: Coordinate, replica: int) -> int:
        """Return the rank that is a replica of a cell. Replicas are counted over the replica axes, the last one
        fastest."""
        coordinate = list(cell)
        for axis in reversed(self.replica_axes):
            coordinates = self.ranks.ranges[axis]
            replica, at = divmod(replica, len(coordinates))
            coordinate[axis] = coordinates.start + at
        return self.ranks.at(coordinate)

    def holders(self, cell: Coordinate) -> list[int]:
        """Return the ranks that hold a cell, in the order of their replica numbers."""
        return [self.holder(cell, replica) for replica in range(self.replicas)]

    def lost(self, gone: frozenset[int]) -> bool:
        """True if all holders of some element are among the ranks that are gone."""
        cells = [cell for cell in self.cells() if gone.issuperset(self.holders(cell))]
        return any(self.box(cell).elements for cell in cells)

    def parts(self, box: Box) -> Iterator[tuple[Coordinate, Box]]:
        """Yield the cells that meet a box, row-major by where they lie, each with its part of the box.

        Takes time in proportion to their number, not to that of all cells: a rank of 8,192 meets a few.
        """
        for cell, part in self.regions.parts(box, self.ranks.ranges):
            yield tuple(cell), part
