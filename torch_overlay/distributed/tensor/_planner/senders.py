"""Senders: which of several replicas sends a piece in an all-to-all, and how much the busiest rank sends.

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
many digits of shard axes as shared cuts, all tied digits of replica axes find a partner. Standard library only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from .regions import overlaps

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

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

    def over(self, axes: tuple[int, ...]) -> Exchange:
        """The same over another group."""
        return self._replace(axes=axes)

    def diagonals(self) -> tuple[Diagonal, ...]:
        """Each tied digit of a replica axis with a digit of a shard axis that isn't tied, of the same base if there is
        one left; all within the group."""
        shards, tied = self.shards, self._tied()
        replicas = [digit for digit in tied if digit.axis in self.axes and digit.axis not in shards]
        if not replicas:
            return ()
        free = [digit for digit in self._cuts(shards.intersection(self.axes)) if digit not in tied]
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
        found, shards = [], self.shards
        for old, new in zip(self.before.orders, self.after.orders):
            boxes, depth = math.prod([self.before.sizes[a] for a in old]), 1
            for axis in new:
                if depth < boxes and axis not in shards:
                    found.append(axis)
                depth *= self.before.sizes[axis]
        return frozenset(found)

    def most_sent(self, diagonals: Collection[Diagonal], least_kept: int) -> int:
        """The elements that the busiest rank sends to others. Never less than that, and exact in most cases where all
        cuts are even and made of the same primes.

        Args:
            least_kept: what every rank, at least, wants of what it holds already.
        """
        if self.shards.issuperset(self.after.sharded):  # all that a rank holds goes to the same number of others
            alike = [axis for axis in self.axes if axis in self.shards and axis not in self.after.sharded]
            return math.prod([self.before.sizes[axis] for axis in alike]) * self.before.most - least_kept
        if not all(map(self._aligned, range(len(self.before.shape)))):
            return self._most_uneven(diagonals) - least_kept
        tied = self._tied()
        paired = {diagonal.replica for diagonal in diagonals}
        idle = math.prod([d.base for d in tied if d.axis not in self.shards and d not in paired])
        terms = math.prod([self.before.sizes[axis] for axis in self.reduced])
        return idle * terms * self.after.most - max(least_kept, 0 if paired else self._kept(tied))

    def _kept(self, tied: list[Digit]) -> int:
        """What each of the nearest senders wants of what it holds, if all of them want some; else 0.

        A rank wants some if the tied digits have the values that they must have. Those of replica axes have them on
        each rank that is a nearest sender at all; those of a shard axis, if it cuts the same place before and after.
        """
        old, new = _depths(self.before), _depths(self.after)
        if any(old.get(digit.axis) != new[digit.axis] for digit in tied if digit.axis in self.shards):
            return 0
        return math.prod([min(self.before.longest(d), self.after.longest(d)) for d in range(len(self.before.shape))])

    def _most_uneven(self, diagonals: Collection[Diagonal]) -> int:
        """The elements that a rank has to send at most, with its own, whatever the cuts."""
        used = {diagonal.shard for diagonal in diagonals}
        alike = [axis for axis in self.axes if axis in self.shards and axis not in self.after.sharded]
        receivers = math.prod([d.base for axis in alike for d in self._digits(axis) if d not in used])
        # Of a pair with two bases, a coordinate on the replica axis may belong to several on the shard axis.
        receivers *= math.prod([-(-shard.base // replica.base) for replica, shard in diagonals])
        return receivers * math.prod([self._most_along(dim, diagonals) for dim in range(len(self.before.shape))])

    def _most_along(self, dim: int, diagonals: Collection[Diagonal]) -> int:
        """Along one dim, the most elements that a rank sends, summed over all coordinates of receivers that can differ.

        A sum over what is paired with a replica digit is a sum over that digit. If the other digit of the pair cuts the
        target too, it is taken where there is most.
        """
        paired, used = ({pair[side] for pair in diagonals} for side in (0, 1))
        cuts = self._cuts(self.after.orders[dim])
        same = [digit for digit in cuts if digit.axis not in self.shards and digit not in paired]
        summed = [digit for digit in cuts if digit not in same and digit not in used]
        if len(summed) == len(cuts):
            return self.before.longest(dim)  # all of it is wanted by somebody, and by one coordinate only
        most: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}  # by sender, and what is summed over
        order = self.before.orders[dim]
        for elements, held, wanted in overlaps(self.before, self.after, dim):
            sender = (*[held[a] for a in order], *[digit.of(wanted) for digit in same])
            key = sender, tuple([digit.of(wanted) for digit in summed])
            most[key] = max(most.get(key, 0), elements)
        sent: dict[tuple[int, ...], int] = {}
        for (sender, _), elements in most.items():
            sent[sender] = sent.get(sender, 0) + elements
        return max(sent.values(), default=0)

    def _tied(self) -> list[Digit]:
        """The digits that cut the target where the source is cut too: they say in which box of the source it lies."""
        found = []
        for old, new in zip(self.before.orders, self.after.orders):
            boxes, depth = math.prod([self.before.sizes[a] for a in old]), 1
            for digit in self._cuts(new):
                if depth < boxes:
                    found.append(digit)
                depth *= digit.base
        return found

    def _aligned(self, dim: int) -> bool:
        """Is this dim cut as before, or evenly and by the same primes as far as it is cut before and after?"""
        orders = self.before.orders[dim], self.after.orders[dim]
        if orders[0] == orders[1]:
            return True
        old, new = ([self.before.sizes[axis] for axis in order] for order in orders)
        if self.before.shape[dim] % max(math.prod(old), math.prod(new)):
            return False
        if all(a == b for a, b in zip(old, new)):
            return True
        return all(a.base == b.base for a, b in zip(*map(self._cuts, orders)))

    def _cuts(self, order: Iterable[int]) -> list[Digit]:
        """The digits of the axes that cut a dim, outer to inner."""
        return [digit for axis in order for digit in self._digits(axis)]

    def _digits(self, axis: int) -> Iterator[Digit]:
        """The digits of the coordinate on an axis, the most significant first."""
        unit = self.before.sizes[axis]
        for base in primes(unit):
            unit //= base
            yield Digit(axis, unit, base)


def _depths(regions: Regions) -> dict[int, tuple[int, int]]:
    """For each axis that cuts a dim, the dim and the number of boxes that the axes outside of it make there."""
    found = {}
    for dim, order in enumerate(regions.orders):
        boxes = 1
        for axis in order:
            found[axis] = dim, boxes
            boxes *= regions.sizes[axis]
    return found


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
