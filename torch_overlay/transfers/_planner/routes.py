"""Routes: what one rank sends to whom and receives from whom, of one tensor.

Each element that a rank wants and lacks comes once, from one of those that hold it; what it has it doesn't get. Each
rank finds its own pieces from what it holds and wants, in time in proportion to their number, and no other rank's.
Standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...distributed.tensor._planner.boxes import Box
from .balance import Class
from .lines import Line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .balance import Weights
    from .sides import Coordinate, Move


class Piece(NamedTuple):
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


def receives(move: Move, rank: int, weights: Weights) -> list[Piece]:
    """What a rank gets from others."""
    source, target = move.source, move.target
    here = target.ranks.coordinate(rank)
    if here is None:
        return []
    there = source.ranks.coordinate(rank)
    own = source.cell(there) if there is not None else None
    copy, found = target.replica(here), []
    for cell, part in source.parts(target.box(here)):
        if cell == own:
            continue
        line = _line(move, cell, weights)
        for replica, first, last in line.senders(line.begin(copy, part), part):
            found.append(Piece(source.holder(cell, replica), part, first, last))
    return found


def sends(move: Move, rank: int, weights: Weights) -> list[Piece]:
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
                found.append(Piece(receiver, part, first, last))
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
