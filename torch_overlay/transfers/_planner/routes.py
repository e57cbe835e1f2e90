"""What one rank sends to whom and receives from whom, of one tensor. Standard library only.

Each element that a rank wants and lacks comes once, from one of those that hold it; what it has it doesn't get. Each
rank finds its own pieces from what it holds and wants, in time in proportion to their number, and no other rank's.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from ...distributed.tensor._planner.regions import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .sides import Coordinate, Ranks, Side


# --- How the replicas of a box share what they have to send of it ---
# All that is wanted of one box of the source is laid out on a line: the first copy of the box that the targets want,
# then the next one; in each copy the parts, row-major by where they lie in the box. What a rank wants is then one
# interval, and where it begins follows from the part's own place:
#
#     begin = copy * elements + a1 * n2 * n3 + l1 * a2 * n3 + l1 * l2 * a3      (in three dims)
#
# for a part that starts at a and has lengths l, in a box of lengths n. Where a target rank holds the box itself, its
# interval is cut out of the line. The replicas cut what is left among themselves, in order. So a sender and a
# receiver find the same pieces without asking, each from the boxes that it holds and wants, and whoever sends is busy
# in proportion to its weight.


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


# --- How much each replica sends, so that the busiest rank sends least ---
# How much each replica sends, over all tensors of a transfer, so that the busiest rank sends least.
#
# Tensors that are cut by the same axes of one mesh have the same replicas. They are a class, and what a cell of a
# class has to send can be shared among its replicas in any proportion. `balance` finds the proportions: each cell in
# turn fills up those of its replicas that send least, until they are level. That is descent on the sum of squares,
# one block of variables after the other; and the loads with the least sum of squares have the least maximum as well,
# since the loads that are possible are the base of a polymatroid. A few rounds do.
#
# Where no rank has anything in place and all cuts are even, equal shares are best and nothing has to be computed.
# That is so for most transfers from one set of ranks to another. Else the time grows with the ranks of the source and
# with the number of different moves. Every rank computes the same, in whole numbers.


ROUNDS = 16
ENOUGH = 200  # stop when a round takes less than one part in so many from the busiest rank


class Class(NamedTuple):
    """Tensors that have the same replicas."""

    ranks: Ranks
    cut: frozenset[int]

    @staticmethod
    def of(source: Side) -> Class:
        """The class of a tensor with this source: its ranks, and the axes that cut it. Ranks that differ only in their
        coordinates on other axes are replicas."""
        return Class(source.ranks, source.regions.sharded)


Weights = Mapping[tuple[Class, "Coordinate"], Sequence[int]]


def balance(moves: Iterable[Move], gone: frozenset[int] = frozenset()) -> Weights:
    """By class and cell, the bytes that each replica should send; what isn't in it is shared evenly. Ranks that are
    gone send nothing."""
    counted = Counter(moves)
    if not gone and (_is_even(counted) or all(move.source.replicas == 1 for move in counted)):
        return {}
    loads: dict[int, int] = {}
    flexible: dict[tuple[Class, Coordinate], _Share] = {}
    for move, times in counted.items():
        kind = Class.of(move.source)
        for cell in move.source.cells():
            wanted = times * move.itemsize * Line.of(move, cell).total
            share = flexible.get((kind, cell))
            if share is None:
                ranks = [rank for rank in move.source.holders(cell) if rank not in gone]
                share = flexible[kind, cell] = _Share(ranks, [0] * len(ranks))
            share.add_evenly(wanted)
    for share in flexible.values():
        for rank, load in zip(share.ranks, share.loads):
            loads[rank] = loads.get(rank, 0) + load
    flexible = {key: share for key, share in flexible.items() if (gone or len(share.ranks) > 1) and any(share.loads)}
    _level(loads, list(flexible.values()))
    if not gone:
        return {key: tuple(share.loads) for key, share in flexible.items()}
    every = {
        (Class.of(move.source), cell): move.source.holders(cell) for move in counted for cell in move.source.cells()
    }
    sent = {key: dict(zip(share.ranks, share.loads)) for key, share in flexible.items()}
    return {key: tuple([of.get(rank, 0) for rank in every[key]]) for key, of in sent.items()}


class _Share(NamedTuple):
    """What the replicas of one cell send of one class, in bytes."""

    ranks: list[int]
    loads: list[int]

    def add_evenly(self, wanted: int) -> None:
        many, given = len(self.ranks), 0
        for number in range(many):
            upto = wanted * (number + 1) // many
            self.loads[number] += upto - given
            given = upto

    def level(self, loads: dict[int, int]) -> None:
        """Share anew, given what the ranks send of everything."""
        others = [loads[rank] - load for rank, load in zip(self.ranks, self.loads)]
        self.loads[:] = filled(others, sum(self.loads))
        for rank, other, load in zip(self.ranks, others, self.loads):
            loads[rank] = other + load


def _level(loads: dict[int, int], shares: list[_Share]) -> None:
    shares.sort(key=lambda share: len(share.ranks))  # those with little choice first
    for _ in range(ROUNDS):
        busiest = max(loads.values(), default=0)
        if busiest * len(loads) == sum(loads.values()):
            return
        for share in shares:
            share.level(loads)
        if (busiest - max(loads.values(), default=0)) * ENOUGH < busiest:
            return


def filled(loads: Sequence[int], more: int) -> list[int]:
    """What each gets of `more` if the least loaded are filled up until they are level.

    >>> filled([5, 0, 2], 6)  # up to a level of 4
    [0, 4, 2]
    """
    order = sorted(range(len(loads)), key=loads.__getitem__)
    below, many = 0, 0
    for many, number in enumerate(order, 1):
        below += loads[number]
        if many == len(order) or (below + more) // many <= loads[order[many]]:
            break
    level, rest = divmod(below + more, many)
    found = [0] * len(loads)
    for place, number in enumerate(order[:many]):
        found[number] = level + (place < rest) - loads[number]
    return found


def _is_even(moves: Iterable[Move]) -> bool:
    """Whether equal shares are best because all ranks of a mesh have the same to send, and no rank is in two meshes
    with some of its ranks only."""
    meshes: list[Ranks] = []
    for move in moves:
        source = move.source
        if source.ranks.meets(move.target.ranks) or not _cuts_evenly(source):
            return False
        if source.ranks not in meshes:
            meshes.append(source.ranks)
    pairs = [(one, other) for number, one in enumerate(meshes) for other in meshes[:number]]
    return all(not one.meets(other) or one.same_set(other) for one, other in pairs)


def _cuts_evenly(side: Side) -> bool:
    shape, sizes, orders, _ = side.regions
    return all(length % math.prod([sizes[axis] for axis in order]) == 0 for length, order in zip(shape, orders))


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
    """Yield the numbers of the copies of the line's box that have an element between the places `low` and `high` of the
    line, ascending. Bisects for the first, because a line may have thousands of copies.

    Args:
        copies: how many there are: the replicas of the target.
    """
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
