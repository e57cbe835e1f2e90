"""`Move`: one tensor from one mesh to another, and what one rank sends and receives for it. Standard library only.

A rank gets each element that it wants and lacks once, from one of the ranks that hold it. Each rank computes its own
part from what it holds and wants, in time in proportion to the pieces that it sends and receives, whatever the number
of ranks. Start at `Move.routes`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from ...distributed.tensor._planner.boxes import Box
from .boxes import grain_of, place_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .sides import Coordinate, Ranks, Side


# --- How the replicas of a box share what they have to send of it ---
# All that target ranks want of one box of the source is laid out on a line of elements. Each replica of the target
# wants one copy of the box, cut into parts by the target's mesh. The line has the copies one after the other, and in
# each copy the parts, row-major by where they lie in the box. So what one rank wants is one interval of the line, and
# where it begins follows from the part's own place:
#
#     begin = copy * elements + a1 * n2 * n3 + l1 * a2 * n3 + l1 * l2 * a3      (in three dims)
#
# for a part that starts at a and has lengths l, in a box of lengths n. Where a target rank holds the box itself, its
# interval is cut out of the line as a hole. The replicas of the source share what is left, each one interval, in order.
# So a sender and a receiver compute the same pieces without asking, each from the boxes that it holds and wants.


class Line(NamedTuple):
    """The line of one box of the source, and the interval of it that each replica sends.

    Attributes:
        cell: the box's cell in the source.
        box: of the whole tensor.
        total: the elements on the line, without holes.
        holes: where the holes begin on the line with holes, ascending.
        skipped: for each hole, the elements in it and in the holes before it.
        ends: for each replica, where its interval ends; None if all intervals are equally long.
        replicas: how many ranks hold the box.
    """

    cell: Coordinate
    box: Box
    total: int
    holes: tuple[int, ...]
    skipped: tuple[int, ...]
    ends: tuple[int, ...] | None
    replicas: int

    @staticmethod
    def of(move: Move, cell: Coordinate, weights: Sequence[int] | None = None) -> Line:
        """Return the line of a cell of the source."""
        source, target = move.source, move.target
        box, replicas = source.box(cell), source.replicas
        holes = sorted(_in_place(move, cell, box)) if source.ranks.meets(target.ranks) else []
        skipped = tuple(accumulate([length for _, length in holes]))
        total = target.replicas * box.elements - (skipped[-1] if skipped else 0)
        ends = None
        if weights is not None and any(weights):
            whole = sum(weights)
            ends = tuple([total * upto // whole for upto in accumulate(weights)])
        return Line(cell, box, total, tuple([begin for begin, _ in holes]), skipped, ends, replicas)

    def begin(self, copy: int, part: Box) -> int:
        """Return where the interval of one target rank begins: a position on the line without holes, in elements."""
        return self.closed(copy * self.box.elements + place_in(part, self.box))

    def closed(self, place: int) -> int:
        """Map a position on the line with holes to the line without them."""
        before = bisect_left(self.holes, place)
        return place - (self.skipped[before - 1] if before else 0)

    def end(self, replica: int) -> int:
        """Return where the interval of a source replica ends: a position on the line without holes, in elements.

        It is the first position after the interval, where that of the next replica begins. For replica -1 it is 0.
        """
        if replica < 0:
            return 0
        return self.total * (replica + 1) // self.replicas if self.ends is None else self.ends[replica]

    def sender(self, place: int) -> int:
        """Return the replica that sends the element at a position of the line without holes. The position is less than
        `total`."""
        if self.ends is not None:
            return bisect_right(self.ends, place)
        guess = place * self.replicas // self.total  # the replica, or the one before it, as `end` rounds down
        while self.end(guess) <= place:
            guess += 1
        return guess

    def senders(self, begin: int, part: Box) -> Iterator[tuple[int, int, int]]:
        """Yield (replica, first, last) for each replica that sends some of a part: the elements from `first` to `last -
        1` of it, counted row-major."""
        replica, place, elements = self.sender(begin), begin, part.elements
        while place < begin + elements:
            first, last = self.cut(replica, begin, part)
            if first < last:
                yield replica, first, last
            place = self.end(replica)
            replica += 1

    def cut(self, replica: int, begin: int, part: Box) -> tuple[int, int]:
        """Return (first, last): the replica sends the elements from `first` to `last - 1` of a part, counted row-major;
        nothing if both are equal."""
        elements, grain = part.elements, grain_of(part)
        first, last = [min(max(self.end(r) - begin, 0), elements) for r in (replica - 1, replica)]
        # Two neighbours round the position between them alike, so that each element has one sender.
        return first // grain * grain, last // grain * grain


def _in_place(move: Move, cell: Coordinate, box: Box) -> Iterator[tuple[int, int]]:
    """Yield the holes of a line: what target ranks want of the box and already hold, so that nobody sends it."""
    source, target = move.source, move.target
    for replica in range(source.replicas):
        there = target.ranks.coordinate(source.holder(cell, replica))
        if there is not None:
            part = target.box(there).meet(box)
            if part.elements:
                yield target.replica(there) * box.elements + place_in(part, box), part.elements


# --- How much each replica sends, over all tensors, so that the busiest rank sends as little as can be ---
# Tensors that are sharded by the same axes of one mesh have the same replicas. They are a class, and what a cell of a
# class has to send can be shared among its replicas in any proportion. `shares_of_replicas` finds the proportions:
# for one cell after the other, it gives more to those replicas that send least so far, until they are level. That is
# descent on the sum of squares, one block of variables at a time. The loads with the least sum of squares also have
# the least maximum, since the possible loads are the base of a polymatroid. A few rounds are enough.
#
# Where no rank has anything in place and all shards are equally large, equal shares are best, and nothing has to be
# computed. That is so for most transfers from one set of ranks to another. Else the time grows with the ranks of the
# source and with the number of different moves. Every rank computes the same shares, in integers.


ROUNDS = 16
ENOUGH = 200  # stop when a round takes less than 1/200 from the busiest rank


class ReplicaClass(NamedTuple):
    """Tensors that have the same replicas: their ranks are equal, and so are the axes that shard them.

    Attributes:
        cut: the axes that shard them.
    """

    ranks: Ranks
    cut: frozenset[int]

    @staticmethod
    def of(source: Side) -> ReplicaClass:
        """Return the class of a tensor with this source: its ranks, and the axes that shard it."""
        return ReplicaClass(source.ranks, source.regions.sharded)


SendShares = Mapping[tuple[ReplicaClass, "Coordinate"], Sequence[int]]


def shares_of_replicas(moves: Iterable[Move], gone: frozenset[int] = frozenset()) -> SendShares:
    """Compute how many bytes each replica is to send, over all tensors."""
    counted = Counter(moves)
    if not gone and (_is_even(counted) or all(move.source.replicas == 1 for move in counted)):
        return {}
    loads: dict[int, int] = {}
    flexible: dict[tuple[ReplicaClass, Coordinate], _CellShare] = {}
    for move, times in counted.items():
        kind = ReplicaClass.of(move.source)
        for cell in move.source.cells():
            wanted = times * move.itemsize * Line.of(move, cell).total
            share = flexible.get((kind, cell))
            if share is None:
                ranks = [rank for rank in move.source.holders(cell) if rank not in gone]
                share = flexible[kind, cell] = _CellShare(ranks, [0] * len(ranks))
            share.add_evenly(wanted)
    for share in flexible.values():
        for rank, load in zip(share.ranks, share.loads):
            loads[rank] = loads.get(rank, 0) + load
    flexible = {key: share for key, share in flexible.items() if (gone or len(share.ranks) > 1) and any(share.loads)}
    _level(loads, list(flexible.values()))
    if not gone:
        return {key: tuple(share.loads) for key, share in flexible.items()}
    # The shares have a place for each replica, also for those that are gone, which send 0 bytes.
    holders = {
        (ReplicaClass.of(move.source), cell): move.source.holders(cell)
        for move in counted
        for cell in move.source.cells()
    }
    by_rank = {key: dict(zip(share.ranks, share.loads)) for key, share in flexible.items()}
    return {key: tuple([loads.get(rank, 0) for rank in holders[key]]) for key, loads in by_rank.items()}


class _CellShare(NamedTuple):
    """How the replicas of one cell share what its class has to send of it.

    Attributes:
        ranks: the replicas, without those that are gone.
        loads: the bytes of each.
    """

    ranks: list[int]
    loads: list[int]

    def add_evenly(self, wanted: int) -> None:
        """Add `wanted` bytes, in shares that differ by at most one byte."""
        count, given = len(self.ranks), 0
        for number in range(count):
            upto = wanted * (number + 1) // count
            self.loads[number] += upto - given
            given = upto

    def level(self, loads: dict[int, int]) -> None:
        """Share the same bytes anew, so that the loads of the replicas differ as little as can be."""
        others = [loads[rank] - load for rank, load in zip(self.ranks, self.loads)]
        self.loads[:] = filled(others, sum(self.loads))
        for rank, other, load in zip(self.ranks, others, self.loads):
            loads[rank] = other + load


def _level(loads: dict[int, int], shares: list[_CellShare]) -> None:
    """Level the shares of one cell after the other, until the largest load stops falling. Changes both arguments."""
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
    """Distribute `more` so that the smallest loads rise to one level. Returns what is added to each load.

    >>> filled([5, 0, 2], 6)  # up to a level of 4
    [0, 4, 2]
    """
    order = sorted(range(len(loads)), key=loads.__getitem__)
    below, count = 0, 0
    for count, number in enumerate(order, 1):
        below += loads[number]
        if count == len(order) or (below + more) // count <= loads[order[count]]:
            break
    level, left = divmod(below + more, count)
    added = [0] * len(loads)
    for place, number in enumerate(order[:count]):
        added[number] = level + (place < left) - loads[number]
    return added


def _is_even(moves: Iterable[Move]) -> bool:
    """True if it is certain that equal shares are best: source and target have no rank in common, each source is cut
    into equal shards, and two source meshes have either the same ranks or none in common."""
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
    """True if all shards of a side have the same size."""
    shape, sizes, orders, _ = side.regions
    return all(length % math.prod([sizes[axis] for axis in order]) == 0 for length, order in zip(shape, orders))


class Share(NamedTuple):
    """What one rank sends to another, or receives from it, of one tensor.

    Attributes:
        peer: the other rank.
        box: of the whole tensor, the part of the sender's box that the receiver wants.
        first, last: the sender sends the elements from `first` to `last - 1` of the box, counted row-major. Replicas
            send the others.
    """

    peer: int
    box: Box
    first: int
    last: int


class Routes(NamedTuple):
    """What one rank does for a tensor.

    Attributes:
        kept: boxes of the whole tensor that it wants and holds already; it copies these itself.
    """

    sends: list[Share]
    receives: list[Share]
    kept: list[Box]


class Move(NamedTuple):
    """One tensor from a source on one mesh to a target on another. Compared by value: equal moves are planned once.

    Attributes:
        source, target: of one shape, without pending reductions.
        itemsize: the bytes of an element as it travels.
    """

    source: Side
    target: Side
    itemsize: int

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the source, then those of the target. A rank may be in both."""
        return self.source.ranks.ranks + self.target.ranks.ranks

    def held(self, rank: int) -> Box | None:
        """Return the box of the whole tensor that a rank's source has; None for a rank outside of the source."""
        return _box_of(self.source, rank)

    def wanted(self, rank: int) -> Box | None:
        """Return the box of the whole tensor that a rank's target has; None for a rank outside of the target."""
        return _box_of(self.target, rank)

    def kept(self, rank: int) -> Box | None:
        """Return the box of the whole tensor that a rank wants and holds already; None if there is none."""
        old, new = self.source.ranks.coordinate(rank), self.target.ranks.coordinate(rank)
        if old is None or new is None:
            return None
        box = self.target.box(new).meet(self.source.box(old))
        return box if box.elements else None

    def lost(self, gone: frozenset[int]) -> bool:
        """True if all holders of some element are among the ranks that are gone."""
        return self.source.lost(gone)

    def routes(self, rank: int, send_shares: SendShares) -> Routes:
        """Compute what a rank sends, receives and keeps."""
        kept = self.kept(rank)
        return Routes(sends(self, rank, send_shares), receives(self, rank, send_shares), [] if kept is None else [kept])


def _box_of(side: Side, rank: int) -> Box | None:
    """Return the box that a rank has of a side; None for a rank outside."""
    coordinate = side.ranks.coordinate(rank)
    return None if coordinate is None else side.box(coordinate)


def receives(move: Move, rank: int, send_shares: SendShares) -> list[Share]:
    """Compute what a rank receives, ordered by box. Empty for a rank outside of the target."""
    source, target = move.source, move.target
    target_coordinate = target.ranks.coordinate(rank)
    if target_coordinate is None:
        return []
    source_coordinate = source.ranks.coordinate(rank)
    own_cell = source.cell(source_coordinate) if source_coordinate is not None else None
    copy, has_no_replicas, shares = target.replica(target_coordinate), source.replicas == 1, []
    for cell, part in source.parts(target.box(target_coordinate)):
        if cell == own_cell:
            continue  # it holds this part itself
        if has_no_replicas:  # the one holder sends all, and no line is needed
            shares.append(Share(source.ranks.at(cell), part, 0, part.elements))
            continue
        line = _line(move, cell, send_shares)
        for replica, first, last in line.senders(line.begin(copy, part), part):
            shares.append(Share(source.holder(cell, replica), part, first, last))
    return shares


def sends(move: Move, rank: int, send_shares: SendShares) -> list[Share]:
    """Compute what a rank sends. Empty for a rank outside of the source.

    It only visits the copies that have some of the rank's own interval of the line, not all replicas of the target.
    """
    source, target = move.source, move.target
    coordinate = source.ranks.coordinate(rank)
    if coordinate is None:
        return []
    cell = source.cell(coordinate)
    line, replica = _line(move, cell, send_shares), source.replica(coordinate)
    low, high = line.end(replica - 1), line.end(replica)
    if low == high:
        return []
    parts = list(target.parts(line.box))
    sides_overlap, shares = source.ranks.meets(target.ranks), []
    for copy in _copies(line, target.replicas, low, high):
        for target_cell, part in parts:
            receiver = target.holder(target_cell, copy)
            if sides_overlap and _holds(move, receiver, cell):
                continue
            first, last = line.cut(replica, line.begin(copy, part), part)
            if first < last:
                shares.append(Share(receiver, part, first, last))
    return shares


def _line(move: Move, cell: Coordinate, send_shares: SendShares) -> Line:
    """Return the line of a cell, shared by the bytes that its class gives each replica; evenly, if it gives none."""
    return Line.of(move, cell, send_shares.get((ReplicaClass.of(move.source), cell)) if send_shares else None)


def _holds(move: Move, rank: int, cell: Coordinate) -> bool:
    """True if a rank holds a cell of the source."""
    coordinate = move.source.ranks.coordinate(rank)
    return coordinate is not None and move.source.cell(coordinate) == cell


def _copies(line: Line, copies: int, low: int, high: int) -> Iterator[int]:
    """Yield the numbers of the copies of the line's box that have an element between the positions `low` and `high` of
    the line, ascending. Bisects for the first, because a line may have thousands of copies."""
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
