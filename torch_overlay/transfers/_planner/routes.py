"""Routes: what one rank sends to whom and receives from whom, of one tensor.

Each element that a rank wants and lacks comes once, from one of those that hold it; what it has it doesn't get. Each
rank finds its own pieces from what it holds and wants, in time in proportion to their number, and no other rank's.
Standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...distributed.tensor._planner.regions import Box
from .balance import Class
from .lines import Line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .balance import Weights
    from .sides import Coordinate, Side


class Share(NamedTuple):
    """What goes from one rank to another of one tensor.

    Attributes:
        peer: the other rank.
        box: the part of the sender's box that the receiver wants, in the global tensor.
        first, last: the elements of it that this sender sends, row-major: from one to before another.
    """

    peer: int
    box: Box
    first: int
    last: int


class Routes(NamedTuple):
    """What one rank does for a tensor: what it sends, what it gets, and boxes that it has already of what it wants."""

    sends: list[Share]
    receives: list[Share]
    kept: list[Box]


class Move(NamedTuple):
    """One tensor's way from its source to its target.

    Attributes:
        source, target: of equal shape; nothing is pending.
        itemsize: the bytes of an element.
    """

    source: Side
    target: Side
    itemsize: int

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of both sides; one of both stands there twice."""
        return self.source.ranks.ranks + self.target.ranks.ranks

    def held(self, rank: int) -> Box | None:
        """What a rank has memory for of the source; None outside of it."""
        return _memory(self.source, rank)

    def wanted(self, rank: int) -> Box | None:
        """What a rank has memory for of the target; None outside of it."""
        return _memory(self.target, rank)

    def kept(self, rank: int) -> Box | None:
        """What a rank has already of what it wants; None if nothing."""
        old, new = self.source.ranks.coordinate(rank), self.target.ranks.coordinate(rank)
        if old is None or new is None:
            return None
        box = self.target.box(new).meet(self.source.box(old))
        return box if box.elements else None

    def lost(self, gone: frozenset[int]) -> bool:
        """Whether some element is on ranks only that are gone."""
        return self.source.lost(gone)

    def routes(self, rank: int, weights: Weights) -> Routes:
        """What a rank does."""
        kept = self.kept(rank)
        return Routes(sends(self, rank, weights), receives(self, rank, weights), [] if kept is None else [kept])


def _memory(side: Side, rank: int) -> Box | None:
    coordinate = side.ranks.coordinate(rank)
    return None if coordinate is None else side.box(coordinate)


def receives(move: Move, rank: int, weights: Weights) -> list[Share]:
    """What a rank gets from others."""
    source, target = move.source, move.target
    here = target.ranks.coordinate(rank)
    if here is None:
        return []
    there = source.ranks.coordinate(rank)
    own = source.cell(there) if there is not None else None
    copy, only, found = target.replica(here), source.replicas == 1, []
    for cell, part in source.parts(target.box(here)):
        if cell == own:
            continue
        if only:  # who has it sends it all
            found.append(Share(source.ranks.at(cell), part, 0, part.elements))
            continue
        line = _line(move, cell, weights)
        for replica, first, last in line.senders(line.begin(copy, part), part):
            found.append(Share(source.holder(cell, replica), part, first, last))
    return found


def sends(move: Move, rank: int, weights: Weights) -> list[Share]:
    """What a rank sends to others."""
    source, target = move.source, move.target
    there = source.ranks.coordinate(rank)
    if there is None:
        return []
    cell = source.cell(there)
    line, replica = _line(move, cell, weights), source.replica(there)
    low, high = line.end(replica - 1), line.end(replica)
    if low == high:
        return []
    parts = list(target.parts(line.box))
    overlapping, found = source.ranks.meets(target.ranks), []
    for copy in _copies(line, target.replicas, low, high):
        for where, part in parts:
            receiver = target.holder(where, copy)
            if overlapping and _holds(move, receiver, cell):
                continue
            first, last = line.cut(replica, line.begin(copy, part), part)
            if first < last:
                found.append(Share(receiver, part, first, last))
    return found


def _line(move: Move, cell: Coordinate, weights: Weights) -> Line:
    return Line.of(move, cell, weights.get((Class.of(move.source), cell)) if weights else None)


def _holds(move: Move, rank: int, cell: Coordinate) -> bool:
    there = move.source.ranks.coordinate(rank)
    return there is not None and move.source.cell(there) == cell


def _copies(line: Line, copies: int, low: int, high: int) -> Iterator[int]:
    """The copies of the box of which some lies between two places of the line: found by bisection, since a line grows
    with the copies."""
    elements = line.box.elements
    first, beyond = 0, copies
    while first < beyond:
        middle = (first + beyond) // 2
        if line.closed((middle + 1) * elements) <= low:
            first = middle + 1
        else:
            beyond = middle
    while first < copies and line.closed(first * elements) < high:
        yield first
        first += 1
