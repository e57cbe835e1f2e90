"""Steps: what a plan is made of. Each is a frozen value that says what changes, the
same on every rank.

A step, except Divide, knows the regions `before` and `after` it. What one rank copies,
sends and receives follows from its coordinate alone, so a runner computes it once per
plan. All counts are in elements.

A box without elements is nowhere: where a local step has one, the tensor is made anew.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from .regions import Box

if TYPE_CHECKING:
    from .regions import Regions

Coordinate = Sequence[int]


class Piece(NamedTuple):
    """A block that goes to or comes from a member of the group.

    Attributes:
        member: its place in `members(coordinate)`.
        box: where the block is in the local tensor (before the step for what is sent,
            after it for what is received).
        add: reduce into what the box has from earlier pieces, instead of writing it.
    """

    member: int
    box: Box
    add: bool = False


# --- Who sends in an all-to-all ---
# Ranks that hold the same piece are replicas of one another; they differ along axes
# that don't cut the source, the replica axes. The other axes of the group are its shard
# axes: they cut the source, or a reduction is pending there. For each coordinate on the
# shard axes a rank has one sender; the sender's coordinate on the replica axes is free.
#
# Four elements go from R·S0 to S0·R on (2, 2); axis 0 is the replica axis, axis 1 the
# shard axis:
#
#     rank     holds   wants   nearest sender   sender on the diagonal
#     (0, 0)   0 1     0 1     itself           itself
#     (0, 1)   2 3     0 1     (0, 0)           (1, 0)
#     (1, 0)   0 1     2 3     (1, 1)           (0, 1)
#     (1, 1)   2 3     2 3     itself           itself
#
# The nearest sender has the receiver's own coordinate on the replica axes. The group
# then needs the shard axes alone, but two ranks send everything and two send nothing;
# on (8, 8) each rank (i, i) sends to seven others. A sender lies on the receiver's
# diagonal if `replica coordinate - shard coordinate` is the same for both: here each
# rank sends to one. On a diagonal, too, each element comes once: for each coordinate on
# the shard axes the diagonal has one rank, and a rank is its own sender of what it
# holds.
#
# Which axes make a diagonal? A replica axis is tied if it cuts the target where the
# source is cut too, as axis 0 above: its coordinate says which shard of the source a
# rank wants. All ranks that want one shard then have the same coordinate on that axis,
# and so have their nearest senders: the other replicas of the shard would send nothing.
# A tied axis is paired with a shard axis that isn't tied, as axis 1: ranks that differ
# along it want the same shard, and each replica sends to some of them.


class Digit(NamedTuple):
    """A digit of the coordinate on an axis: `coordinate // unit % base`. `base` is a
    prime factor of the size.

    Axes of different sizes are paired digit by digit: what the head of this file says
    of axes and coordinates is true of digits, and differences are modulo the base.

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
    """Ranks for which `replica - shard` is the same, modulo the base of `replica`. The
    bases may differ: several values of a longer shard digit then belong to one of the
    replica digit, and several ranks ask one replica.

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
        """Move `other`, whose replica digit is that of `coordinate`, onto its
        diagonal."""
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
    """What an all-to-all does: from these boxes to those, over a group, with terms of a
    reduction along `reduced`."""

    @cached_property
    def shards(self) -> frozenset[int]:
        """The axes of the whole mesh along which ranks hold different parts or
        different terms."""
        return self.before.sharded.union(self.reduced)

    def diagonals(self) -> tuple[Diagonal, ...]:
        """Each tied digit of a replica axis with a digit of a shard axis that isn't
        tied, of the same base if there is one left; all within the group.

        Let all cuts be even, let the digits along each dim have the same bases in
        source and target as far as both go, and let the group have all axes that cut
        source or target. Then no rank sends more than the busiest receives: at the
        place of each tied digit the source has one of the same base, so every tied
        replica digit finds a partner. The shard digits that are then neither tied nor
        paired multiply what a rank sends by as much as the new boxes are longer, where
        the target is cut less than the source.
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
        # First those that don't cut the target: all ranks want the same along them, so
        # that it is easier to tell how much a rank sends.
        free.sort(key=lambda digit: digit.axis in self.after.sharded)
        partners: dict[Digit, Digit] = {}
        for alike in (True, False):
            for replica in [digit for digit in replicas if digit not in partners]:
                shard = next(
                    (
                        digit
                        for digit in free
                        if not alike or digit.base == replica.base
                    ),
                    None,
                )
                if shard is not None:
                    free.remove(shard)
                    partners[replica] = shard
        return tuple([Diagonal(*pair) for pair in partners.items()])

    def tied(self) -> frozenset[int]:
        """The replica axes, in the group or not, that cut the target where the source
        is cut too."""
        return frozenset([digit.axis for digit in self.tied_digits()]) - self.shards

    def tied_digits(self) -> list[Digit]:
        """The digits that cut the target where the source is cut too: they say in which
        chunk of the source the wanted part lies."""
        found = []
        for old, new in zip(self.before.orders, self.after.orders):
            boxes, depth = math.prod([self.before.sizes[a] for a in old]), 1
            for digit in self.cuts(new):
                if depth < boxes:
                    found.append(digit)
                depth *= digit.base
        return found

    def cuts(self, order: Iterable[int]) -> list[Digit]:
        """The digits of these axes, in their order; those of one axis from the most
        significant."""
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


# --- Steps ---


@dataclass(frozen=True, slots=True)
class Divide:
    """Local: true division by `by`: the terms of an average, before they are summed, or
    a value, before equal parts of it become terms of a sum or of a norm."""

    by: float


@dataclass(frozen=True, slots=True)
class _Change:
    before: Regions
    after: Regions


@dataclass(frozen=True, slots=True)
class Narrow(_Change):
    """Local: cut `box(coordinate)` out of the local tensor; all that the target wants
    is here."""

    def box(self, coordinate: Coordinate) -> Box:
        """Where the wanted part is in the local tensor; with nothing wanted, an empty
        box of the target's shape."""
        held, wanted = self.before.box(coordinate), self.after.box(coordinate)
        return (
            wanted.inside(held)
            if wanted.elements
            else Box((0,) * len(wanted.length), wanted.length)
        )


@dataclass(frozen=True, slots=True)
class Embed(_Change):
    """Local: a shard becomes a term of a sum: zeros of the new shape, with the shard in
    `box(coordinate)`."""

    def box(self, coordinate: Coordinate) -> Box:
        """Where the local tensor goes in the new one."""
        held, wanted = self.before.box(coordinate), self.after.box(coordinate)
        return (
            held.inside(wanted)
            if held.elements
            else Box((0,) * len(held.length), held.length)
        )


@dataclass(frozen=True)
class Collective(_Change):
    """A step that communicates, over the joint group of `axes` (ascending, none of size
    1).

    A member is a coordinate of this group; members are numbered in row-major order of
    their coordinates over `axes`. A piece is packed row-major, and a member has one at
    most; one whose member is the rank itself is a local copy. A runner looks up the
    ranks of the members and lays the pieces out in the order of the group that it has,
    so that a group that is sorted otherwise can't mix data up.
    """

    axes: tuple[int, ...]

    @cached_property
    def ranks(self) -> int:
        """The size of the joint group."""
        return math.prod([self.before.sizes[a] for a in self.axes])

    def members(self, coordinate: Coordinate) -> list[tuple[int, ...]]:
        """The coordinates of the joint group that `coordinate` is in, row-major over
        `axes`."""
        return list(itertools.product(*self._ranges(coordinate, self.axes)))

    def member(self, coordinate: Coordinate) -> int:
        """The place of a coordinate in `members`."""
        place = 0
        for axis in self.axes:
            place = place * self.before.sizes[axis] + coordinate[axis]
        return place

    def _ranges(self, coordinate: Coordinate, axes: Collection[int]) -> list[range]:
        """The coordinates that differ from this one only on these axes."""
        sizes = enumerate(self.before.sizes)
        return [
            range(n) if a in axes else range(coordinate[a], coordinate[a] + 1)
            for a, n in sizes
        ]

    def _with_all(
        self, coordinate: Coordinate, whole: Box, parts: Regions
    ) -> list[Piece]:
        """What each member has, by `parts`, of a box of this rank; one with an empty
        part is left out."""
        found = _shared(whole, parts, self._ranges(coordinate, self.axes))
        return sorted([Piece(self.member(there), box) for there, box in found])


@dataclass(frozen=True)
class AllGather(Collective):
    """Everybody's box to everybody: the target box is the union of the group's boxes.

    To run it: pack the local tensor, padded to `chunk`; all_gather_into_tensor; copy
    each of `pieces(coordinate)` into its box.
    """

    @cached_property
    def chunk(self) -> int:
        """The elements that each rank contributes, padding included."""
        return self.before.most

    def pieces(self, coordinate: Coordinate) -> list[Piece]:
        """Where each member's elements go in the gathered tensor; a member with an
        empty box has no piece."""
        return self._with_all(coordinate, self.after.box(coordinate), self.before)

    @cached_property
    def received(self) -> int:
        """Elements that arrive from others."""
        return (self.ranks - 1) * self.chunk


@dataclass(frozen=True)
class AllReduce(Collective):
    """The reduction `op` over the group, for everybody."""

    op: str

    @cached_property
    def received(self) -> int:
        """Elements that arrive from others, if each rank reduces its part and then all
        parts are gathered."""
        return -(-2 * (self.ranks - 1) * self.before.most // self.ranks)


@dataclass(frozen=True)
class ReduceScatter(Collective):
    """The reduction `op` over the group, to each rank its own target box, which lies in
    its source box.

    To run it: pack `pieces(coordinate)`, each padded to `chunk`; reduce_scatter_tensor;
    the first elements are this rank's. With `rounds`, one part of each piece after the
    other.
    """

    op: str
    rounds: int = 1

    @cached_property
    def chunk(self) -> int:
        """The elements that each rank gets, padding included."""
        return self.after.most

    def pieces(self, coordinate: Coordinate) -> list[Piece]:
        """What of the local tensor goes to each member; a member with an empty box has
        no piece, only padding."""
        return self._with_all(coordinate, self.before.box(coordinate), self.after)

    @cached_property
    def received(self) -> int:
        """Elements that arrive from others."""
        return (self.ranks - 1) * self.chunk


@dataclass(frozen=True)
class AllToAll(Collective):
    """Each element to whoever wants and lacks it, once. With `op`, it also ends the
    reduction over `reduced`, which are some of its axes: each rank gets every term of
    its target box and reduces them one after the other. So `op` can't be "avg": that is
    a `Divide` and then "sum".

    To run it: pack `sends(coordinate)`, each at the place of its member;
    all_to_all_single with one size for each member; copy (or, with `op`, reduce) each
    of `receives(coordinate)` into its box, in the order in which `receives` gives them.
    With `rounds`, one part of each piece after the other.

    Several ranks of the group may hold the same part and term of the source. A rank
    exchanges pieces with one of them for each part and term: these are its peers.
    Without `diagonals` that is the nearest.
    """

    op: str | None = None
    reduced: tuple[int, ...] = ()
    diagonals: tuple[Diagonal, ...] = ()
    rounds: int = 1

    @cached_property
    def exchange(self) -> Exchange:
        """What is to be done, without who sends what."""
        return Exchange(self.before, self.after, self.axes, self.reduced)

    def sends(self, coordinate: Coordinate) -> list[Piece]:
        """What of the local tensor goes to whom, itself included; by the coordinates of
        the peers on the shard axes of the group, which is one order on all ranks."""
        return [
            Piece(self.member(peer), box)
            for peer, box in self._with_peers(coordinate, self.before, self.after)
        ]

    def receives(self, coordinate: Coordinate) -> list[Piece]:
        """Where what comes from whom goes, itself included; in the same order. Terms of
        one reduction come in the same order on all ranks, so that all get the same
        bits; the first is written, the others are reduced into it."""
        shared = self._with_peers(coordinate, self.after, self.before)
        return [
            Piece(self.member(peer), box, any(peer[a] for a in self.reduced))
            for peer, box in shared
        ]

    def _with_peers(
        self, coordinate: Coordinate, mine: Regions, theirs: Regions
    ) -> list[tuple[list[int], Box]]:
        """What each peer has, by `theirs`, of this rank's box.

        From R·S0 to S0·R on (2, 2), the peers of (0, 1) are (0, 0) and itself; on the
        diagonal, (1, 0) and itself. A rank is a peer of its peers: to be on one
        diagonal is an equivalence.
        """
        shards = self.exchange.shards
        cut = [axis for axis in self.axes if axis in shards]
        moved = {diagonal.replica.axis for diagonal in self.diagonals} & theirs.sharded
        found = []
        for there, box in _shared(
            mine.box(coordinate), theirs, self._ranges(coordinate, moved.union(cut))
        ):
            peer = there
            if self.diagonals:
                peer = [
                    there[axis] if axis in cut else at
                    for axis, at in enumerate(coordinate)
                ]
                for diagonal in self.diagonals:
                    diagonal.follow(peer, coordinate)
                if any(peer[axis] != there[axis] for axis in moved):
                    continue
            found.append((peer, box))
        return sorted(found, key=lambda shared: [shared[0][axis] for axis in cut])


def _shared(
    mine: Box, theirs: Regions, ranges: list[range]
) -> Iterator[tuple[list[int], Box]]:
    """What the coordinates in these ranges have (or will have, by `theirs`) of my box,
    counted from its first element. Those with no part of it are left out."""
    alike = [
        axis
        for axis, some in enumerate(ranges)
        if len(some) > 1 and axis not in theirs.sharded
    ]
    some = theirs.parts(mine, ranges, mine.start)
    if not alike:
        yield from some
        return
    for there, box in some:
        for places in itertools.product(*[ranges[axis] for axis in alike]):
            each = there.copy()
            for axis, at in zip(alike, places):
                each[axis] = at
            yield each, box


Step = Narrow | Embed | Divide | Collective


def last_collective(steps: Sequence[Step]) -> int:
    """The place of the last collective; -1 if there is none."""
    return max(
        [number for number, step in enumerate(steps) if isinstance(step, Collective)],
        default=-1,
    )
