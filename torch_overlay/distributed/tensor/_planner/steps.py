"""Steps: what a plan is made of. A step is a frozen value that says what changes, and
is the same on every rank.

Each step except Divide has the regions `before` and `after` it. What one rank copies,
sends and receives follows from its coordinate alone, so a runner computes it once for a
plan. All counts are in elements.

A box without elements has no place in another box. Where a local step has one, its
tensor is made anew.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from .boxes import Box

if TYPE_CHECKING:
    from .regions import Regions

Coordinate = Sequence[int]


class PeerBox(NamedTuple):
    """A block that a rank sends to or receives from a member of the group.

    Attributes:
        member: the number of that member in `members(coordinate)`.
        box: the place of the block in the local tensor: in that before the step for a
            block to send, in that after the step for one to receive.
        add: reduce the block into what earlier pieces wrote there. Otherwise overwrite.
    """

    member: int
    box: Box
    add: bool = False


# --- Who sends in an all-to-all ---
# Ranks that hold the same piece are replicas of one another. They differ along axes
# that don't cut the source: the replica axes. The other axes of the group are its shard
# axes: they cut the source, or a reduction is pending over them. A rank has one sender
# for each coordinate on the shard axes. Which replica it is, that is the sender's
# coordinate on the replica axes, can be chosen.
#
# Four elements go from R·S0 to S0·R on (2, 2). Axis 0 is the replica axis, axis 1 the
# shard axis:
#
#     rank     holds   wants   nearest sender   sender on the diagonal
#     (0, 0)   0 1     0 1     itself           itself
#     (0, 1)   2 3     0 1     (0, 0)           (1, 0)
#     (1, 0)   0 1     2 3     (1, 1)           (0, 1)
#     (1, 1)   2 3     2 3     itself           itself
#
# The nearest sender has the receiver's coordinate on the replica axes. Then the group
# needs only the shard axes, but two ranks send everything and two send nothing. On
# (8, 8) each rank (i, i) sends to seven others.
#
# A sender on the receiver's diagonal has the same `replica coordinate - shard
# coordinate` as the receiver. Here each rank then sends to one other. Each element
# still arrives once, since a diagonal has one rank for each coordinate on the shard
# axes. A rank is its own sender of what it holds.
#
# Which axes make a diagonal? A replica axis is tied if it cuts the target where the
# source is cut, too, as axis 0 does above: the coordinate on it says which shard of the
# source a rank wants. All ranks that want one shard then have the same coordinate on
# that axis, and so do their nearest senders, while the other replicas of the shard
# would send nothing. A tied axis is paired with a shard axis that isn't tied, here axis
# 1: ranks that differ along it want the same shard, and each replica sends to some of
# them.


class Digit(NamedTuple):
    """A digit of the coordinate on an axis: `coordinate // unit % base`. Its base is a
    prime factor of the axis size.

    Axes of different sizes are paired digit by digit. What is said above of axes and
    coordinates holds for digits, with differences modulo the base.

    >>> first = Digit(axis=0, unit=2, base=2)  # of the two digits of an axis of size 4
    >>> [first.of((at,)) for at in range(4)]
    [0, 0, 1, 1]
    """

    axis: int
    unit: int
    base: int

    def of(self, coordinate: Sequence[int]) -> int:
        return coordinate[self.axis] // self.unit % self.base


class Diagonal(NamedTuple):
    """A pair of digits. Ranks lie on one diagonal if `replica - shard` is the same for
    them, modulo the base of `replica`.

    If the bases differ, several values of the shard digit go with one of the replica
    digit, and several ranks receive from one replica.

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
        """Move `other`, in place, onto the diagonal of `coordinate`. On entry both have
        the same replica digit."""
        replica, shard = self
        digit = replica.of(coordinate)
        moved = (digit + shard.of(other) - shard.of(coordinate)) % replica.base
        other[replica.axis] += replica.unit * (moved - digit)


class _ExchangeFields(NamedTuple):
    before: Regions
    after: Regions
    axes: tuple[int, ...]
    reduced: tuple[int, ...] = ()


class Exchange(_ExchangeFields):
    """The task of an all-to-all: from the boxes `before` to the boxes `after`, over the
    group of `axes`, with a reduction over `reduced`. Who sends what isn't decided yet.
    """

    @cached_property
    def shards(self) -> frozenset[int]:
        """The mesh axes along which ranks hold different parts or different terms."""
        return self.before.sharded.union(self.reduced)

    def diagonals(self) -> tuple[Diagonal, ...]:
        """Pair each tied digit of a replica axis with a digit of a shard axis that
        isn't tied, of the same base if one is left. All axes are in the group.

        The pairs bound what a rank sends. Assume that all cuts are even, that along
        each dim the digits of source and target have the same bases as far as both go,
        and that the group has all axes which cut source or target. Then no rank sends
        more than the busiest rank receives. For at the place of each tied digit the
        source has a digit of the same base, so every tied replica digit finds a
        partner. The shard digits that remain, neither tied nor paired, multiply what a
        rank sends by as much as the new boxes are longer, where the target is cut less
        than the source.
        """
        shards, tied = self.shards, self.tied_digits()
        replicas = [
            digit
            for digit in tied
            if digit.axis in self.axes and digit.axis not in shards
        ]
        if not replicas:
            return ()
        free = [
            digit
            for digit in self.cuts([axis for axis in self.axes if axis in shards])
            if digit not in tied
        ]
        # Digits that don't cut the target come first. All ranks want the same along
        # them, which makes it easier to tell how much a rank sends.
        free.sort(key=lambda digit: digit.axis in self.after.sharded)
        partners: dict[Digit, Digit] = {}
        for same_base in (True, False):
            for replica in [digit for digit in replicas if digit not in partners]:
                shard = next(
                    (
                        digit
                        for digit in free
                        if not same_base or digit.base == replica.base
                    ),
                    None,
                )
                if shard is not None:
                    free.remove(shard)
                    partners[replica] = shard
        return tuple([Diagonal(*pair) for pair in partners.items()])

    def tied(self) -> frozenset[int]:
        """Return the replica axes that cut the target where the source is cut, too."""
        return frozenset([digit.axis for digit in self.tied_digits()]) - self.shards

    def tied_digits(self) -> list[Digit]:
        """Return the digits that cut the target where the source is cut, too. They say
        in which shard of the source a wanted box lies."""
        tied = []
        for old, new in zip(self.before.orders, self.after.orders):
            shards, pieces = math.prod([self.before.sizes[a] for a in old]), 1
            for digit in self.cuts(new):
                # Deeper digits cut within one shard of the source.
                if pieces < shards:
                    tied.append(digit)
                pieces *= digit.base
        return tied

    def cuts(self, order: Iterable[int]) -> list[Digit]:
        """Return the digits of these axes in order, per axis the most significant
        first."""
        return [digit for axis in order for digit in self._digits(axis)]

    def _digits(self, axis: int) -> Iterator[Digit]:
        """Yield the digits of the coordinate on an axis, the most significant first."""
        unit = self.before.sizes[axis]
        for base in primes(unit):
            unit //= base
            yield Digit(axis, unit, base)


def primes(number: int) -> list[int]:
    """Return the prime factors of a number, in ascending order; none of 1.

    >>> primes(12)
    [2, 2, 3]
    """
    factors, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors + [number] if number > 1 else factors


# --- Steps ---


@dataclass(frozen=True, slots=True)
class Divide:
    """Local: true division by `by`. It divides the terms of an average before they are
    summed, or a value that becomes equal terms of a sum or a norm."""

    by: float


@dataclass(frozen=True, slots=True)
class _Change:
    before: Regions
    after: Regions


@dataclass(frozen=True, slots=True)
class Narrow(_Change):
    """Local: cut `box(coordinate)` out of the local tensor, which has all that the
    target wants."""

    def box(self, coordinate: Coordinate) -> Box:
        """Return the place of the target box in the local tensor; if that is empty, an
        empty box of its shape."""
        old, new = self.before.box(coordinate), self.after.box(coordinate)
        return (
            new.inside(old) if new.elements else Box((0,) * len(new.length), new.length)
        )


@dataclass(frozen=True, slots=True)
class Embed(_Change):
    """Local: make a shard a term of a sum. The new tensor is zero except in
    `box(coordinate)`, which has the shard."""

    def box(self, coordinate: Coordinate) -> Box:
        """Return the place of the local tensor in the new one."""
        old, new = self.before.box(coordinate), self.after.box(coordinate)
        return (
            old.inside(new) if old.elements else Box((0,) * len(old.length), old.length)
        )


@dataclass(frozen=True)
class Collective(_Change):
    """A step that communicates, over the joint process group of `axes` (ascending, none
    of size 1).

    A member is a coordinate of this group. Members are numbered in row-major order of
    their coordinates over `axes`. A member sends this rank one piece at most, packed
    row-major; the piece of the rank itself is a local copy.

    Numbers of members aren't ranks of a process group: a runner translates them, so
    that a group whose ranks are in another order doesn't mix up data.
    """

    axes: tuple[int, ...]

    @cached_property
    def ranks(self) -> int:
        """The size of the joint group."""
        return math.prod([self.before.sizes[a] for a in self.axes])

    def members(self, coordinate: Coordinate) -> list[tuple[int, ...]]:
        """Return the coordinates of this one's group, row-major over `axes`."""
        return list(itertools.product(*self._ranges(coordinate, self.axes)))

    def member(self, coordinate: Coordinate) -> int:
        """Return the number of a coordinate in `members`: its place in the group."""
        number = 0
        for axis in self.axes:
            number = number * self.before.sizes[axis] + coordinate[axis]
        return number

    def _ranges(self, coordinate: Coordinate, axes: Collection[int]) -> list[range]:
        """Return a range for each mesh axis: one index, or all on these axes."""
        sizes = enumerate(self.before.sizes)
        return [
            range(n) if a in axes else range(coordinate[a], coordinate[a] + 1)
            for a, n in sizes
        ]

    def _pieces_by_member(
        self, coordinate: Coordinate, whole: Box, parts: Regions
    ) -> list[PeerBox]:
        """Return the parts of a box of this rank that members hold by `parts`, in the
        order of the members, none empty."""
        holders = _holders_of(whole, parts, self._ranges(coordinate, self.axes))
        return sorted([PeerBox(self.member(holder), box) for holder, box in holders])


@dataclass(frozen=True)
class AllGather(Collective):
    """All-gather: the target box is the union of the boxes of the group.

    To run it: pack the local tensor, padded to `chunk`; call all_gather_into_tensor;
    copy each of `pieces(coordinate)` into its box.
    """

    @cached_property
    def chunk(self) -> int:
        """The elements that each rank contributes, padding included."""
        return self.before.most

    def pieces(self, coordinate: Coordinate) -> list[PeerBox]:
        """Return where each member's elements go in the target, unless it has none."""
        return self._pieces_by_member(
            coordinate, self.after.box(coordinate), self.before
        )

    @cached_property
    def received(self) -> int:
        """The elements that a rank receives from others."""
        return (self.ranks - 1) * self.chunk


@dataclass(frozen=True)
class AllReduce(Collective):
    """All-reduce with `op` over the group."""

    op: str

    @cached_property
    def received(self) -> int:
        """The elements that a rank receives, if parts are reduced and then gathered."""
        return -(-2 * (self.ranks - 1) * self.before.most // self.ranks)


@dataclass(frozen=True)
class ReduceScatter(Collective):
    """Reduce-scatter with `op` over the group. The target box of each rank lies in its
    source box.

    To run it: pack `pieces(coordinate)`, each padded to `chunk`; call
    reduce_scatter_tensor; the first elements are this rank's. With `rounds`, do so for
    one part of every piece at a time.
    """

    op: str
    rounds: int = 1

    @cached_property
    def chunk(self) -> int:
        """The elements that each rank gets, padding included."""
        return self.after.most

    def pieces(self, coordinate: Coordinate) -> list[PeerBox]:
        """Return which part of the local tensor goes to each member; one with an empty
        box has no piece, only padding."""
        return self._pieces_by_member(
            coordinate, self.before.box(coordinate), self.after
        )

    @cached_property
    def received(self) -> int:
        """The elements that a rank receives from others."""
        return (self.ranks - 1) * self.chunk


@dataclass(frozen=True)
class AllToAll(Collective):
    """All-to-all: each element goes once to every rank that wants and lacks it.

    With `op` it also ends the reduction over `reduced`, some of its axes: each rank
    gets every term of its target box and reduces them one after the other. So `op`
    can't be "avg", which is planned as a Divide and a "sum".

    To run it: pack `sends(coordinate)` in the order of the members; call
    all_to_all_single with the elements for each member as splits; copy (with `op`,
    reduce) each of `receives(coordinate)` into its box, in the order of `receives`.
    With `rounds`, do so for one part of every piece at a time.

    Several ranks of the group may hold the same part and term of the source. For each
    part and term a rank exchanges pieces with one of them, its peer: the nearest one,
    or with `diagonals` the one on its diagonal.
    """

    op: str | None = None
    reduced: tuple[int, ...] = ()
    diagonals: tuple[Diagonal, ...] = ()
    rounds: int = 1

    @cached_property
    def exchange(self) -> Exchange:
        """The task of this step, without who sends what."""
        return Exchange(self.before, self.after, self.axes, self.reduced)

    def sends(self, coordinate: Coordinate) -> list[PeerBox]:
        """Return which part of the local tensor goes to which member, this rank
        included, sorted by the peers' coordinates on the group's shard axes: alike on
        all ranks."""
        return [
            PeerBox(self.member(peer), box)
            for peer, box in self._pieces_by_peer(coordinate, self.before, self.after)
        ]

    def receives(self, coordinate: Coordinate) -> list[PeerBox]:
        """Return where the part from each member goes, this rank included, sorted as in
        `sends`. All ranks reduce the terms in this order, so all get the same bits."""
        parts = self._pieces_by_peer(coordinate, self.after, self.before)
        return [
            PeerBox(self.member(peer), box, any(peer[a] for a in self.reduced))
            for peer, box in parts
        ]

    def _pieces_by_peer(
        self, coordinate: Coordinate, mine: Regions, theirs: Regions
    ) -> list[tuple[list[int], Box]]:
        """Return the part of this rank's box in `mine` that each peer has in `theirs`,
        by the coordinate of the peer. Parts are counted from the first element of the
        box.

        From R·S0 to S0·R on (2, 2), the nearest peers of (0, 1) are (0, 0) and itself;
        on the diagonal they are (1, 0) and itself. If one rank is a peer of another,
        the reverse holds, too: to be on one diagonal is an equivalence.
        """
        shards = self.exchange.shards
        cut = [axis for axis in self.axes if axis in shards]
        moved = {diagonal.replica.axis for diagonal in self.diagonals} & theirs.sharded
        pieces = []
        for holder, box in _holders_of(
            mine.box(coordinate), theirs, self._ranges(coordinate, moved.union(cut))
        ):
            # Without diagonals only shard axes are searched, so the holder that is
            # found has this rank's own coordinate on the replica axes: it is the
            # nearest.
            peer = holder
            if self.diagonals:
                peer = [
                    holder[axis] if axis in cut else own
                    for axis, own in enumerate(coordinate)
                ]
                for diagonal in self.diagonals:
                    diagonal.follow(peer, coordinate)
                # This holder has the part, but isn't the one that the diagonal chooses.
                if any(peer[axis] != holder[axis] for axis in moved):
                    continue
            pieces.append((peer, box))
        return sorted(pieces, key=lambda piece: [piece[0][axis] for axis in cut])


def _holders_of(
    mine: Box, theirs: Regions, ranges: list[range]
) -> Iterator[tuple[list[int], Box]]:
    """Yield who holds which part of my box by `theirs`, counted from its first
    element."""
    replicated = [
        axis
        for axis, coordinates in enumerate(ranges)
        if len(coordinates) > 1 and axis not in theirs.sharded
    ]
    holders = theirs.parts(mine, ranges, mine.start)
    if not replicated:
        yield from holders
        return
    for holder, box in holders:
        for coordinates in itertools.product(*[ranges[axis] for axis in replicated]):
            replica = holder.copy()
            for axis, coordinate in zip(replicated, coordinates):
                replica[axis] = coordinate
            yield replica, box


Step = Narrow | Embed | Divide | Collective


def last_collective(steps: Sequence[Step]) -> int:
    """Return the index of the last collective; -1 if there is none."""
    return max(
        [number for number, step in enumerate(steps) if isinstance(step, Collective)],
        default=-1,
    )
