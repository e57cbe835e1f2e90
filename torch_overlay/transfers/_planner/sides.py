"""Sides: one tensor on one mesh, as ranks and boxes. A transfer has two, its source and its target.

Standard library only.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ...distributed.tensor._planner.regions import Box, Regions

Coordinate = tuple[int, ...]


class Ranks:
    """The ranks of a mesh: which one stands at each coordinate. A value: equal ranks in equal order are one key.

    Attributes:
        ranges: for each axis, its coordinates that take part: all of them, or the one of a slice.
        ranks: row-major over these.
    """

    __slots__ = ("_hash", "_met", "_places", "_strides", "ranges", "ranks")

    def __init__(self, ranks: Iterable[int], ranges: Iterable[range]) -> None:
        self.ranks, self.ranges = tuple(ranks), tuple(ranges)
        if math.prod(map(len, self.ranges)) != len(self.ranks):
            raise ValueError(f"{len(self.ranks)} ranks for coordinates in {self.ranges}")
        self._places = {rank: place for place, rank in enumerate(self.ranks)}
        if len(self._places) != len(self.ranks):
            raise ValueError(f"a rank stands twice in {self.ranks}")
        strides = [1]
        for coordinates in reversed(self.ranges[1:]):
            strides.append(strides[-1] * len(coordinates))
        self._strides = tuple(reversed(strides))
        self._met: dict[Ranks, bool] = {}
        self._hash = hash((self.ranks, self.ranges))

    @staticmethod
    def of(ranks: Iterable[int], sizes: Iterable[int]) -> Ranks:
        """A whole mesh of these sizes, its ranks row-major."""
        return Ranks(ranks, map(range, sizes))

    def at(self, coordinate: Sequence[int]) -> int:
        """The rank at a coordinate that takes part."""
        place = 0
        for at, stride, coordinates in zip(coordinate, self._strides, self.ranges):
            place += (at - coordinates.start) * stride
        return self.ranks[place]

    def coordinate(self, rank: int) -> Coordinate | None:
        """Where a rank stands; None if it takes no part."""
        place = self._places.get(rank)
        if place is None:
            return None
        found = []
        for stride, coordinates in zip(self._strides, self.ranges):
            found.append(coordinates.start + place // stride % len(coordinates))
        return tuple(found)

    def meets(self, other: Ranks) -> bool:
        """Whether some rank is in both. Remembered, since a model has many tensors and few meshes."""
        found = self._met.get(other)
        if found is None:
            found = self._met[other] = not self._places.keys().isdisjoint(other._places)
        return found

    def same_set(self, other: Ranks) -> bool:
        """Whether both have the same ranks, in whatever order."""
        return self._places.keys() == other._places.keys()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Ranks) and (self.ranks, self.ranges) == (other.ranks, other.ranges)

    def __hash__(self) -> int:
        return self._hash


class Side(NamedTuple):
    """Which rank holds which box of one tensor.

    The axes that cut the tensor say which box; ranks that differ on other axes only are replicas. A cell is a box with
    the coordinate of its first replica.
    """

    regions: Regions
    ranks: Ranks

    def box(self, coordinate: Coordinate) -> Box:
        """What the rank at a coordinate holds."""
        return self.regions.box(coordinate)

    def cell(self, coordinate: Coordinate) -> Coordinate:
        """The coordinate of the first replica that holds the same."""
        cut, ranges = self.regions.sharded, self.ranks.ranges
        return tuple([at if axis in cut else ranges[axis].start for axis, at in enumerate(coordinate)])

    def cells(self) -> Iterator[Coordinate]:
        """The coordinates of all cells, those of empty boxes among them."""
        cut = self.regions.sharded
        ranges = [r if axis in cut else r[:1] for axis, r in enumerate(self.ranks.ranges)]
        return itertools.product(*ranges)

    @property
    def replica_axes(self) -> tuple[int, ...]:
        """The axes along which ranks hold the same."""
        cut = self.regions.sharded
        return tuple([axis for axis, r in enumerate(self.ranks.ranges) if len(r) > 1 and axis not in cut])

    @property
    def replicas(self) -> int:
        """How many ranks hold each cell."""
        return math.prod([len(self.ranks.ranges[axis]) for axis in self.replica_axes])

    def replica(self, coordinate: Coordinate) -> int:
        """The number of a rank among those that hold the same."""
        number = 0
        for axis in self.replica_axes:
            coordinates = self.ranks.ranges[axis]
            number = number * len(coordinates) + coordinate[axis] - coordinates.start
        return number

    def holder(self, cell: Coordinate, replica: int) -> int:
        """The rank that is this replica of a cell."""
        coordinate = list(cell)
        for axis in reversed(self.replica_axes):
            coordinates = self.ranks.ranges[axis]
            replica, at = divmod(replica, len(coordinates))
            coordinate[axis] = coordinates.start + at
        return self.ranks.at(coordinate)

    def holders(self, cell: Coordinate) -> list[int]:
        """The ranks that hold a cell, by number of the replica."""
        return [self.holder(cell, replica) for replica in range(self.replicas)]

    def lost(self, gone: frozenset[int]) -> bool:
        """Whether some element is on ranks only that are gone."""
        cells = [cell for cell in self.cells() if gone.issuperset(self.holders(cell))]
        return any(self.box(cell).elements for cell in cells)

    def parts(self, box: Box) -> Iterator[tuple[Coordinate, Box]]:
        """The cells that meet a box, row-major by where they lie, each with what it has of the box. Takes time in
        proportion to their number."""
        for cell, part in self.regions.parts(box, self.ranks.ranges):
            yield tuple(cell), part
