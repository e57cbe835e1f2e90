"""Before axes of different sizes are paired by digits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .regions import Regions

Digit = ...
primes = ...


class Diagonal(NamedTuple):
    """Ranks for which `replica - shard`, their coordinates on these two axes of one size, is the same modulo the size.

    From R·S0 to S0·R on (2, 2), rank (0, 1) wants what (0, 0) and (1, 0) hold:

    >>> sender = [0, 0]
    >>> Diagonal(replica=0, shard=1, size=2).follow(sender, (0, 1))
    >>> sender
    [1, 0]
    """

    replica: int
    shard: int
    size: int

    def follow(self, other: list[int], coordinate: Sequence[int]) -> None:
        """Move `other`, whose replica coordinate is that of `coordinate`, onto its diagonal."""
        replica, shard, size = self
        other[replica] = (coordinate[replica] + other[shard] - coordinate[shard]) % size


class Exchange(NamedTuple):
    """What an all-to-all does: from these boxes to those, over a group."""

    before: Regions
    after: Regions
    axes: tuple[int, ...]

    @property
    def shards(self) -> frozenset[int]:
        """The axes of the whole mesh along which ranks hold different parts."""
        return self.before.sharded

    def diagonals(self) -> tuple[Diagonal, ...]:
        """Each tied replica axis with a shard axis of its size that isn't tied, if there is one left; all within the
        group."""
        sizes = self.before.sizes
        tied = []  # the axes that cut the target where the source is cut too: they say in which box of the source it is
        for old, new in zip(self.before.orders, self.after.orders):
            boxes, depth = math.prod([sizes[axis] for axis in old]), 1
            for axis in new:
                if depth < boxes:
                    tied.append(axis)
                depth *= sizes[axis]
        replicas = [axis for axis in tied if axis in self.axes and axis not in self.shards]
        free = [axis for axis in self.axes if axis in self.shards and axis not in tied]
        # First those that don't cut the target: all ranks want the same along them, so that it is easier to tell how
        # much a rank sends.
        free.sort(key=lambda axis: axis in self.after.sharded)
        found = []
        for replica in replicas:
            shard = next((axis for axis in free if sizes[axis] == sizes[replica]), None)
            if shard is not None:
                free.remove(shard)
                found.append(Diagonal(replica, shard, sizes[replica]))
        return tuple(found)
