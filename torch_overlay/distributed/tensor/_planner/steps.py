"""Steps: what a plan is made of. Each is a frozen value that says what changes, the same on every rank.

A step, except Divide, knows the regions `before` and `after` it. What one rank copies, sends and receives follows from
its coordinate alone, so a runner computes it once per plan. All counts are in elements.

A box without elements is nowhere: where a local step has one, the tensor is made anew.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .regions import Box
from .senders import Diagonal, Exchange

if TYPE_CHECKING:
    from .regions import Regions

Coordinate = Sequence[int]


class Piece(NamedTuple):
    """A block that goes to or comes from a member of the group.

    Attributes:
        member: its place in `members(coordinate)`.
        box: where the block is in the local tensor (before the step for what is sent, after it for what is received).
        add: reduce into what the box has from earlier pieces, instead of writing it.
    """

    member: int
    box: Box
    add: bool = False


@dataclass(frozen=True, slots=True)
class Divide:
    """Local: true division by `by`: the terms of an average, before they are summed, or a value, before equal parts of
    it become terms of a sum or of a norm."""

    by: float


@dataclass(frozen=True, slots=True)
class _Change:
    before: Regions
    after: Regions


@dataclass(frozen=True, slots=True)
class Narrow(_Change):
    """Local: cut `box(coordinate)` out of the local tensor; all that the target wants is here."""

    def box(self, coordinate: Coordinate) -> Box:
        """Where the wanted part is in the local tensor; with nothing wanted, an empty box of the target's shape."""
        held, wanted = self.before.box(coordinate), self.after.box(coordinate)
        return wanted.inside(held) if wanted.elements else Box((0,) * len(wanted.length), wanted.length)


@dataclass(frozen=True, slots=True)
class Embed(_Change):
    """Local: a shard becomes a term of a sum: zeros of the new shape, with the shard in `box(coordinate)`."""

    def box(self, coordinate: Coordinate) -> Box:
        """Where the local tensor goes in the new one."""
        held, wanted = self.before.box(coordinate), self.after.box(coordinate)
        return held.inside(wanted) if held.elements else Box((0,) * len(held.length), held.length)


@dataclass(frozen=True, slots=True)
class Collective(_Change):
    """A step that communicates, over the joint group of `axes` (ascending, none of size 1).

    A member is a coordinate of this group; members are numbered in row-major order of their coordinates over `axes`. A
    piece is packed row-major, and a member has one at most; one whose member is the rank itself is a local copy. A
    runner looks up the ranks of the members and lays the pieces out in the order of the group that it has, so that a
    group that is sorted otherwise can't mix data up.
    """

    axes: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """The size of the joint group."""
        return math.prod([self.before.sizes[a] for a in self.axes])

    def members(self, coordinate: Coordinate) -> list[tuple[int, ...]]:
        """The coordinates of the joint group that `coordinate` is in, row-major over `axes`."""
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
        return [range(n) if a in axes else range(coordinate[a], coordinate[a] + 1) for a, n in sizes]

    def _with_all(self, coordinate: Coordinate, whole: Box, parts: Regions) -> list[Piece]:
        """What each member has, by `parts`, of a box of this rank; one with an empty part is left out."""
        found = _shared(whole, parts, self._ranges(coordinate, self.axes))
        return sorted([Piece(self.member(there), box) for there, box in found])


@dataclass(frozen=True, slots=True)
class AllGather(Collective):
    """Everybody's box to everybody: the target box is the union of the group's boxes.

    To run it: pack the local tensor, padded to `chunk`; all_gather_into_tensor; copy each of `pieces(coordinate)` into
    its box.
    """

    @property
    def chunk(self) -> int:
        """The elements that each rank contributes, padding included."""
        return self.before.most

    def pieces(self, coordinate: Coordinate) -> list[Piece]:
        """Where each member's elements go in the gathered tensor; a member with an empty box has no piece."""
        return self._with_all(coordinate, self.after.box(coordinate), self.before)

    @property
    def received(self) -> int:
        """Elements that arrive from others."""
        return (self.ranks - 1) * self.chunk


@dataclass(frozen=True, slots=True)
class AllReduce(Collective):
    """The reduction `op` over the group, for everybody."""

    op: str

    @property
    def received(self) -> int:
        """Elements that arrive from others, if each rank reduces its part and then all parts are gathered."""
        return -(-2 * (self.ranks - 1) * self.before.most // self.ranks)


@dataclass(frozen=True, slots=True)
class ReduceScatter(Collective):
    """The reduction `op` over the group, to each rank its own target box, which lies in its source box.

    To run it: pack `pieces(coordinate)`, each padded to `chunk`; reduce_scatter_tensor; the first elements are this
    rank's. With `rounds`, one part of each piece after the other.
    """

    op: str
    rounds: int = 1

    @property
    def chunk(self) -> int:
        """The elements that each rank gets, padding included."""
        return self.after.most

    def pieces(self, coordinate: Coordinate) -> list[Piece]:
        """What of the local tensor goes to each member; a member with an empty box has no piece, only padding."""
        return self._with_all(coordinate, self.before.box(coordinate), self.after)

    @property
    def received(self) -> int:
        """Elements that arrive from others."""
        return (self.ranks - 1) * self.chunk


@dataclass(frozen=True, slots=True)
class AllToAll(Collective):
    """Each element to whoever wants and lacks it, once. With `op`, it also ends the reduction over `reduced`, which are
    some of its axes: each rank gets every term of its target box and reduces them one after the other. So `op` can't be
    "avg": that is a `Divide` and then "sum".

    To run it: pack `sends(coordinate)`, each at the place of its member; all_to_all_single with one size for each
    member; copy (or, with `op`, reduce) each of `receives(coordinate)` into its box, in the order in which `receives`
    gives them. With `rounds`, one part of each piece after the other.

    Several ranks of the group may hold the same part and term of the source. A rank exchanges pieces with one of them
    for each part and term: these are its peers. Without `diagonals` that is the nearest; see `senders`.
    """

    op: str | None = None
    reduced: tuple[int, ...] = ()
    diagonals: tuple[Diagonal, ...] = ()
    rounds: int = 1

    @property
    def exchange(self) -> Exchange:
        """What is to be done, without who sends what."""
        return Exchange(self.before, self.after, self.axes, self.reduced)

    def sends(self, coordinate: Coordinate) -> list[Piece]:
        """What of the local tensor goes to whom, itself included; by the coordinates of the peers on the shard axes of
        the group, which is one order on all ranks."""
        return [Piece(self.member(peer), box) for peer, box in self._with_peers(coordinate, self.before, self.after)]

    def receives(self, coordinate: Coordinate) -> list[Piece]:
        """Where what comes from whom goes, itself included; in the same order. Terms of one reduction come in the same
        order on all ranks, so that all get the same bits; the first is written, the others are reduced into it."""
        shared = self._with_peers(coordinate, self.after, self.before)
        return [Piece(self.member(peer), box, any(peer[a] for a in self.reduced)) for peer, box in shared]

    def _with_peers(self, coordinate: Coordinate, mine: Regions, theirs: Regions) -> list[tuple[list[int], Box]]:
        """What each peer has, by `theirs`, of this rank's box.

        From R·S0 to S0·R on (2, 2), the peers of (0, 1) are (0, 0) and itself; on the diagonal, (1, 0) and itself. A
        rank is a peer of its peers: to be on one diagonal is an equivalence.
        """
        shards = self.exchange.shards
        cut = [axis for axis in self.axes if axis in shards]
        moved = {diagonal.replica.axis for diagonal in self.diagonals} & theirs.sharded
        found = []
        for there, box in _shared(mine.box(coordinate), theirs, self._ranges(coordinate, moved.union(cut))):
            peer = there
            if self.diagonals:
                peer = [there[axis] if axis in cut else at for axis, at in enumerate(coordinate)]
                for diagonal in self.diagonals:
                    diagonal.follow(peer, coordinate)
                if any(peer[axis] != there[axis] for axis in moved):
                    continue
            found.append((peer, box))
        return sorted(found, key=lambda shared: [shared[0][axis] for axis in cut])


def _shared(mine: Box, theirs: Regions, ranges: list[range]) -> Iterator[tuple[list[int], Box]]:
    """What the coordinates in these ranges have (or will have, by `theirs`) of my box, counted from its first element.
    Those with no part of it are left out."""
    alike = [axis for axis, some in enumerate(ranges) if len(some) > 1 and axis not in theirs.sharded]
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
    return max([number for number, step in enumerate(steps) if isinstance(step, Collective)], default=-1)
