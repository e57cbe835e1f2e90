"""Senders: which of several replicas sends a piece in an all-to-all.

Ranks that hold the same piece are replicas of one another; they differ along axes that don't cut the source, the
replica axes. The other axes of the group are its shard axes: they cut the source, or a reduction is pending over them.
A rank has one sender for each coordinate on the shard axes; which coordinate that one has on the replica axes is to be
chosen. For example, four elements go from R·S0 to S0·R on (2, 2); axis 0 is the replica axis, axis 1 the shard axis:

    rank     holds   wants   nearest sender   sender on the diagonal
    (0, 0)   0 1     0 1     itself           itself
    (0, 1)   2 3     0 1     (0, 0)           (1, 0)
    (1, 0)   0 1     2 3     (1, 1)           (0, 1)
    (1, 1)   2 3     2 3     itself           itself

The nearest sender has the receiver's own coordinate on the replica axes. So the group needs only the shard axes, but
two ranks send all and two send nothing; on (8, 8), each rank (i, i) sends to seven others. A sender is on the
receiver's diagonal if replica coordinate minus shard coordinate is the same for both: here each rank sends to one.

Two things hold on every diagonal, so that each element comes once: for each coordinate on the shard axes it has one
rank, and a rank is its own sender of what it holds.

Which axes make a diagonal? A replica axis is tied if it cuts the target where the source is cut too, as axis 0 above:
its coordinate says which shard of the source a rank wants. So all ranks that want one shard have the same coordinate on
this axis, and their nearest senders have it too: the other replicas of that shard would send nothing. A tied axis is
paired with a shard axis that is not tied, as axis 1: ranks that differ along it want the same shard, and its replicas
send to one of these ranks each.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .regions import Regions


class Digit(NamedTuple):
    """A digit of the coordinate on an axis: `coordinate // unit % base`. `base` is a prime factor of the size.

    Axes of different sizes are paired digit by digit: what the head of this file says of axes and coordinates is true
    of digits, and differences are modulo the base.

    >>> first = Digit(axis=0, unit=2, base=2)  # of the two digits of an axis of size 4
    >>> [first.of((at,)) for at in range(4)]
    [0, 0, 1, 1]
    """

    axis: int
    unit: int
    base: int

    def of(self, coordinate: Sequence[int]) -> int:
        """Its value at a coordinate of the mesh."""
        return coordinate[self.axis] // self.unit % self.base


class Diagonal(NamedTuple):
    """Ranks for which `replica - shard` is the same, modulo the base of `replica`. The bases may differ: several values
    of a longer shard digit then belong to one of the replica digit, and several ranks ask one replica.

    From R·S0 to S0·R on (2, 2), rank (0, 1) wants what (0, 0) and (1, 0) hold:

    >>> sender = [0, 0]
    >>> digits = Digit(axis=0, unit=1, base=2), Digit(axis=1, unit=1, base=2)
    >>> Diagonal(*digits).follow(sender, (0, 1))
    >>> sender
    [1, 0]
    """

    replica: Digit
    shard: Digit

    def follow(self, other: list[int], coordinate: Sequence[int]) -> None:
        """Move `other`, whose replica digit is that of `coordinate`, onto its diagonal."""
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
        one left; all within the group.

        Let all cuts be even, let the digits along each dim have the same bases in source and target as far as both go,
        and let the group have all axes that cut source or target. Then no rank sends more than the busiest receives: at
        the place of each tied digit the source has one of the same base, so every tied replica digit finds a partner.
        The shard digits that are then neither tied nor paired multiply what a rank sends by as much as the new boxes
        are longer, where the target is cut less than the source.
        """
        shards, tied = self.shards, self.tied_digits()
        replicas = [digit for digit in tied if digit.axis in self.axes and digit.axis not in shards]
        if not replicas:
            return ()
        free = [digit for digit in self.cuts([axis for axis in self.axes if axis in shards]) if digit not in tied]
        # First those that don't cut the target: all ranks want the same along them, so that it is easier to tell how
        # much a rank sends.
        free.sort(key=lambda digit: digit.axis in self.after.sharded)
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
        """The digits that cut the target where the source is cut too: they say in which chunk of the source the
        wanted part lies."""
        found = []
        for old, new in zip(self.before.orders, self.after.orders):
            boxes, depth = math.prod([self.before.sizes[a] for a in old]), 1
            for digit in self.cuts(new):
                if depth < boxes:
                    found.append(digit)
                depth *= digit.base
        return found

    def cuts(self, order: Iterable[int]) -> list[Digit]:
        """The digits of these axes, in their order; those of one axis from the most significant."""
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
