"""Senders: which of several replicas sends a piece in an all-to-all.

Ranks that hold the same piece are replicas of one another; they differ along axes that don't cut the source, the
replica axes. The other axes of the group are its shard axes: they cut the source, or a reduction is pending over them.
A rank needs one sender for each coordinate on the shard axes, and may choose its coordinate on the replica axes:

* The nearest sender has the receiver's own coordinate there, so the group needs no replica axis. But from R·S0 to S0·R
  on (8, 8), only rank (i, i) holds what the ranks (i, j) want and is their nearest sender: it sends to 7 ranks.
* Ranks on one diagonal have the same difference between a coordinate on a replica axis and one on a shard axis. If
  senders and receivers are on the same diagonal, (i, j) gets its piece from (j, i) in this example, and each rank sends
  to one. What a rank holds already still needs no sending, because each rank is on one diagonal with itself.

Which axes make a diagonal? A replica axis is tied if it cuts the target where the source is cut too. A rank has nothing
to send to most coordinates on a tied axis. So it is paired with a shard axis that is not tied: what a rank sends is
spread evenly over the coordinates there. Axes of different sizes are paired digit by digit, with a digit for each prime
factor of the size.

Where all cuts are even and made of the same primes, no rank sends more than the busiest rank receives. Proof: on one
dim, each cut that source and target share fixes a digit of the sender's shard coordinate for a given receiver, and for
a given sender a digit of the receiver's shard coordinate, a tied one or one that is paired. As there are at least as
many digits of shard axes as shared cuts, all tied digits of replica axes find a partner.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .regions import Regions


class Digit(NamedTuple):
    """A digit of the coordinate on an axis: `coordinate // unit % base`. `base` is a prime factor of the size."""

    axis: int
    unit: int
    base: int

    def of(self, coordinate: Sequence[int]) -> int:
        """Its value at a coordinate of the mesh."""
        return coordinate[self.axis] // self.unit % self.base


class Diagonal(NamedTuple):
    """Ranks for which `replica - shard` is the same, modulo the base of `replica`."""

    replica: Digit
    shard: Digit

    def follow(self, other: list[int], coordinate: Sequence[int]) -> None:
        """Move `other` on its replica axis onto the diagonal of `coordinate`."""
        replica, shard = self
        digit = replica.of(coordinate)
        moved = (digit + shard.of(other) - shard.of(coordinate)) % replica.base
        other[replica.axis] += replica.unit * (moved - digit)


class Exchange(NamedTuple):
    """What an all-to-all does: from these boxes to those, over a group, with terms of a reduction along `reduced`."""

    before: Regions
    after: Regions
    axes: tuple[int, ...]
    reduced: tuple[int, ...] = ()

    @property
    def shards(self) -> frozenset[int]:
        """The axes of the whole mesh along which ranks hold different parts or different terms."""
        return self.before.sharded.union(self.reduced)

    def diagonals(self) -> tuple[Diagonal, ...]:
        """Each tied digit of a replica axis with a digit of a shard axis that isn't tied, of the same base if there is
        one left; all within the group."""
        shards, tied = self.shards, self.tied_digits()
        replicas = [digit for digit in tied if digit.axis in self.axes and digit.axis not in shards]
        if not replicas:
            return ()
        free = [digit for digit in self.cuts(shards.intersection(self.axes)) if digit not in tied]
        # Along axes that don't cut the target, all ranks want the same.
        free.sort(key=lambda digit: (digit.axis in self.after.sharded, digit.axis, -digit.unit))
        partners: dict[Digit, Digit] = {}
        for alike in (True, False):
            for replica in [digit for digit in replicas if digit not in partners]:
                shard = next((digit for digit in free if not alike or digit.base == replica.base), None)
                if shard is not None:
                    free.remove(shard)
                    partners[replica] = shard
        return tuple([Diagonal(*pair) for pair in partners.items()])

    def tied(self) -> frozenset[int]:
        """The replica axes, in the group or not, that cut the target where the source is cut too."""
        return frozenset([digit.axis for digit in self.tied_digits()]) - self.shards

    def tied_digits(self) -> list[Digit]:
        """The digits that cut the target where the source is cut too: they say in which box of the source it lies."""
        found = []
        for old, new in zip(self.before.orders, self.after.orders):
            boxes, depth = math.prod([self.before.sizes[a] for a in old]), 1
            for digit in self.cuts(new):
                if depth < boxes:
                    found.append(digit)
                depth *= digit.base
        return found

    def cuts(self, order: Iterable[int]) -> list[Digit]:
        """The digits of the axes that cut a dim, outer to inner."""
        return [digit for axis in order for digit in self._digits(axis)]

    def _digits(self, axis: int) -> Iterator[Digit]:
        """The digits of the coordinate on an axis, the most significant first."""
        unit = self.before.sizes[axis]
        for base in primes(unit):
            unit //= base
            yield Digit(axis, unit, base)


def primes(number: int) -> list[int]:
    """Its prime factors, ascending.

    >>> primes(12)
    [2, 2, 3]
    """
    found, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found + [number] if number > 1 else found
