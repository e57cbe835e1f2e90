"""Lines: how the replicas of a box share what they have to send of it.

All that is wanted of one box of the source is laid out on a line: the first copy of the box that the targets want,
then the next one; in each copy the parts, row-major by where they lie in the box. What a rank wants is then one
interval, and where it begins follows from the part's own place:

    begin = copy * elements + a1 * n2 * n3 + l1 * a2 * n3 + l1 * l2 * a3      (in three dims)

for a part that starts at a and has lengths l, in a box of lengths n. Where a target rank holds the box itself, its
interval is cut out of the line. The replicas cut what is left among themselves, in order. So a sender and a receiver
find the same pieces without asking, each from the boxes that it holds and wants, and whoever sends is busy in
proportion to its weight. Standard library only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...distributed.tensor._planner.regions import Box
    from .routes import Move
    from .sides import Coordinate

ROWS = 256  # a part with that many rows is cut between rows; one with fewer, within them


class Line(NamedTuple):
    """What the replicas of one box send.

    Attributes:
        cell, box: of the source.
        total: the elements on the line.
        holes: where intervals were cut out of the line, ascending; each place counted as if none had been cut out.
        gone: for each hole, the elements of it and of those before it.
        ends: for each replica, where what it sends ends on the line.
    """

    cell: Coordinate
    box: Box
    total: int
    holes: tuple[int, ...]
    gone: tuple[int, ...]
    ends: tuple[int, ...] | None
    replicas: int

    @staticmethod
    def of(move: Move, cell: Coordinate, weights: Sequence[int] | None = None) -> Line:
        """The line of a cell of the source, shared evenly or by the weights of its replicas."""
        source, target = move.source, move.target
        box, replicas = source.box(cell), source.replicas
        found = sorted(_in_place(move, cell, box)) if source.ranks.meets(target.ranks) else []
        gone = tuple(accumulate([length for _, length in found]))
        total = target.replicas * box.elements - (gone[-1] if gone else 0)
        ends = None
        if weights is not None and any(weights):
            whole = sum(weights)
            ends = tuple([total * upto // whole for upto in accumulate(weights)])
        return Line(cell, box, total, tuple([begin for begin, _ in found]), gone, ends, replicas)

    def begin(self, copy: int, part: Box) -> int:
        """Where a part of a copy of the box begins on the line."""
        return self.closed(copy * self.box.elements + place_in(part, self.box))

    def closed(self, place: int) -> int:
        """A place on the line, from where it would be if nothing had been cut out."""
        before = bisect_left(self.holes, place)
        return place - (self.gone[before - 1] if before else 0)

    def end(self, replica: int) -> int:
        """Where what a replica sends ends; what the next one sends begins there."""
        if replica < 0:
            return 0
        return self.total * (replica + 1) // self.replicas if self.ends is None else self.ends[replica]

    def sender(self, place: int) -> int:
        """The replica that sends the element at a place of the line."""
        if self.ends is not None:
            return bisect_right(self.ends, place)
        guess = place * self.replicas // self.total
        while self.end(guess) <= place:
            guess += 1
        return guess

    def senders(self, begin: int, part: Box) -> Iterator[tuple[int, int, int]]:
        """Who sends a part that begins at a place: the replica, and the first and last of the elements, row-major."""
        replica, place, elements = self.sender(begin), begin, part.elements
        while place < begin + elements:
            first, last = self.cut(replica, begin, part)
            if first < last:
                yield replica, first, last
            place = self.end(replica)
            replica += 1

    def cut(self, replica: int, begin: int, part: Box) -> tuple[int, int]:
        """Which elements of a part, row-major, a replica sends: from one to before another; none if they are equal."""
        elements, grain = part.elements, grain_of(part)
        first, last = [min(max(self.end(r) - begin, 0), elements) for r in (replica - 1, replica)]
        return first // grain * grain, last // grain * grain  # neighbours round the place between them alike


def _in_place(move: Move, cell: Coordinate, box: Box) -> Iterator[tuple[int, int]]:
    """Of each replica that wants some of its own box: where that begins, nothing being cut out, and its elements."""
    source, target = move.source, move.target
    for replica in range(source.replicas):
        there = target.ranks.coordinate(source.holder(cell, replica))
        if there is not None:
            part = target.box(there).meet(box)
            if part.elements:
                yield target.replica(there) * box.elements + place_in(part, box), part.elements


def place_in(part: Box, box: Box) -> int:
    """How many elements lie in parts before this one, where a box is cut into parts by a grid."""
    place, left, before = 0, box.elements, 1
    for start, length, outer, whole in zip(part.start, part.length, box.start, box.length):
        left //= whole
        place += before * (start - outer) * left
        before *= length
    return place


def grain_of(part: Box) -> int:
    """The elements of a row: what is cut as a whole, where a part has enough of them."""
    rows, grain = 1, part.elements
    for length in part.length:
        if rows >= ROWS:
            break
        rows *= length
        grain //= length
    return grain
