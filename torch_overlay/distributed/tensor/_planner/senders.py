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

The busiest rank of an all-to-all: how much it sends, for the cost model.

A rank sends to one receiver for each coordinate on the shard axes; the receiver's coordinates on the replica axes
follow from the sender's, or from the diagonal. To one receiver it sends a product of overlaps, one for each dim. So all
that it sends is at most a product, too: of what it sends along each dim (`_most_along`), and of the number of receivers
that want the same. No rank is looked at.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from .regions import longest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

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


def most_sent(exchange: Exchange, diagonals: Collection[Diagonal], least_kept: int) -> int:
    """The elements that the busiest rank sends to others: exact where all dims are aligned, see `_aligned`, else not
    less than that, but for a few elements at the ends of uneven chunks.

    From R·S0 to S0·R on (2, 2), sender and receiver have the same coordinate on axis 0, and the receiver has any on
    axis 1: (0, 0) and (1, 1) send what they hold to two ranks, one of them themselves. On a diagonal the receiver's
    coordinate on axis 1 follows from that on axis 0: each rank sends what it holds to one.

    Args:
        least_kept: what every rank, at least, wants of what it holds already.
    """
    before, after, shards = exchange.before, exchange.after, exchange.shards
    paired = {diagonal.replica for diagonal in diagonals}
    used = {diagonal.shard for diagonal in diagonals}
    alike = exchange.cuts([axis for axis in exchange.axes if axis in shards and axis not in after.sharded])
    sent = math.prod([digit.base for digit in alike if digit not in used])
    # In a pair of bases 2 (replica) and 5 (shard), one value of the replica digit goes with up to 3 of the shard digit.
    sent *= math.prod([-(-shard.base // replica.base) for replica, shard in diagonals])
    dims = range(len(before.shape))
    for dim in dims:
        sent *= _most_along(exchange, dim, paired, used)
    nearest = not paired and all(_aligned(exchange, dim) for dim in dims)
    return sent - max(least_kept, _kept(exchange) if nearest else 0)


def _most_along(exchange: Exchange, dim: int, paired: Collection[Digit], used: Collection[Digit]) -> int:
    """Along one dim, the most elements that a rank sends, summed over all receivers that differ in what they want.

    On a replica axis that isn't `paired`, sender and receiver have the same coordinate. On every other digit that cuts
    the target (`summed`) all values are counted; on an axis outside the group only the sender's own overlaps. But the
    value of the `used` digits of shard axes follows from the digit that they are paired with.
    """
    cuts = exchange.cuts(exchange.after.orders[dim])
    same = [digit for digit in cuts if digit.axis not in exchange.shards and digit not in paired]
    summed = [digit for digit in cuts if digit not in same and digit not in used]
    if len(summed) == len(cuts):
        return exchange.before.longest(dim)  # the parts of all receivers cover what a rank holds once
    length, levels = exchange.after.shape[dim], []
    for axis in exchange.after.orders[dim]:
        length = longest(length, [exchange.after.sizes[axis]])
        levels += [(length * digit.unit, digit in summed) for digit in cuts if digit.axis == axis]
    return _most_within(exchange.before.longest(dim), levels)


def _most_within(elements: int, levels: Sequence[tuple[int, bool]]) -> int:
    """Of so many elements in a row, the most that lie where some digits have one value each. The levels are the
    digits from the most significant on: the elements over which one stays as it is, and whether all its values count.

    From R·S0 to S0·S0 on (2, 2), eight elements: rank (0, 0) holds four in a row, and sends those where axis 0 is at
    0, which are four in a row, too; axis 1, over two elements each, has any value.

    >>> _most_within(4, [(4, False), (2, True)])
    4

    Six of eight, where the first digit has any value, and the second, over two elements each, only one:

    >>> _most_within(6, [(4, True), (2, False)])
    4
    """
    for depth, (block, counts) in enumerate(levels):
        if not counts:
            elements = min(elements, block)
        elif elements > block > 0:
            whole, rest = divmod(elements, block)
            inner = levels[depth + 1 :]
            return whole * _most_within(block, inner) + _most_within(rest, inner)
    return elements


def _kept(exchange: Exchange) -> int:
    """The least that a rank which sends at all wants of what it holds, by nearest senders and where cuts are aligned:
    the shorter of both boxes along each dim. But 0 if the new cut has a digit of a shard axis at a place where the old
    cut has another: from S0·S1 to S1·S0 on (2, 2), rank (0, 1) holds the first half of dim 0 and wants the second. A
    dim that is cut as before, even if unevenly, scales what is sent and what is kept alike."""
    before, after = exchange.before, exchange.after
    for old, new in zip(before.orders, after.orders):
        for held, wanted in zip(exchange.cuts(old), exchange.cuts(new)):
            if wanted.axis in exchange.shards and wanted != held:
                return 0
    return math.prod([min(before.longest(dim), after.longest(dim)) for dim in range(len(before.shape))])


def _aligned(exchange: Exchange, dim: int) -> bool:
    """Whether this dim is cut as before; or evenly, and the digits of both cuts have the same bases, one after the
    other, as far as the shorter cut goes."""
    before, after = exchange.before, exchange.after
    orders = before.orders[dim], after.orders[dim]
    if orders[0] == orders[1]:
        return True
    old, new = map(exchange.cuts, orders)
    if any(a.base != b.base for a, b in zip(old, new)):
        return False
    longer = max(old, new, key=len)  # the other is its beginning
    return before.shape[dim] % math.prod([digit.base for digit in longer]) == 0
