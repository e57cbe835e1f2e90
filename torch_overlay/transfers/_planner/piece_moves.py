"""`Pieced` and `PieceMove`: one tensor of which ranks hold any boxes, and no mesh says which. Start at
`Pieced.routes_of`.

The source's boxes are cut into cells that don't overlap, each with the ranks that hold it. All that is wanted of a cell
is laid out on a line, part by part, and the holders share the line evenly. A rank isn't sent what it holds itself. A
sender looks up who wants its cells, a receiver who holds what it wants, and both compute the same shares. Lists of
boxes (`Listed`) and a mesh (`OnMesh`) answer the same questions, so that each side may be either. Standard library
only.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...distributed.tensor._planner.boxes import Box
from .boxes import Boxes, grain_of, without
from .routes import Routes, Share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from .routes import SendShares
    from .sides import Side

Slot = tuple[int, int]  # a piece: its rank, and its number among the pieces of that rank


class Cell(NamedTuple):
    """A box of the source that has no element in common with another cell.

    Attributes:
        box: of the whole tensor.
        holders: the pieces in which it lies, one for each rank that holds it.
    """

    box: Box
    holders: tuple[Slot, ...]


class Want(NamedTuple):
    """A part of a cell that a piece of the target wants, and its rank doesn't hold.

    Attributes:
        slot: the piece of the target.
        box: of the whole tensor.
        begin: where it begins on the cell's line, in elements.
    """

    slot: Slot
    box: Box
    begin: int


class End(Protocol):
    """Which rank has which boxes of one tensor: its source, its target, or a state between two hops of a relay.

    All boxes are of the whole tensor.
    """

    def memory(self, rank: int, number: int) -> Box | None:
        """Return the box for which a rank's piece of this number has memory; None if it has no such piece."""

    def held(self, rank: int) -> Iterable[tuple[int, Box]]:
        """Return the boxes that a rank holds, each with the number of the piece in which it lies."""

    def cells(self, box: Box) -> Iterator[Cell]:
        """Yield the cells that meet a box, in one order on every rank."""

    def cells_of(self, rank: int) -> Iterator[Cell]:
        """Yield the cells that a rank holds, in the order of `cells`."""

    def parts(self, box: Box) -> Iterator[tuple[Slot, Box]]:
        """Yield each piece that meets a box, with the part of the box that it has."""


class Listed:
    """One side of a tensor whose ranks each list the boxes that they hold. See `End`.

    Args:
        given: pairs of a rank and its boxes in the whole tensor, by the number of the piece. Boxes may overlap and may
            be empty.
    """

    def __init__(self, given: Iterable[tuple[int, tuple[Box, ...]]]) -> None:
        self._held = dict(given)
        self._slots = [((rank, number), box) for rank, boxes in self._held.items() for number, box in enumerate(boxes)]
        self._index = Boxes([box for _, box in self._slots])
        self._cells: list[Cell] | None = None

    def among(self, ranks: frozenset[int]) -> Listed:
        """Return the side with these ranks alone."""
        return Listed([(rank, boxes) for rank, boxes in self._held.items() if rank in ranks])

    def memory(self, rank: int, number: int) -> Box | None:
        """Return the box of a rank's piece of this number; None if it has no such piece. See `End`."""
        boxes = self._held.get(rank, ())
        return boxes[number] if number < len(boxes) else None

    def held(self, rank: int) -> Iterable[tuple[int, Box]]:
        """Return the boxes that a rank holds, each with the number of its piece. See `End`."""
        return enumerate(self._held.get(rank, ()))

    def _disjoint(self) -> list[Cell]:
        """Return the cells of this side: boxes that don't overlap, and together cover all that is listed. Computed
        once.

        Equal boxes are one cell, and all their ranks hold it. Where two different boxes overlap, the overlap goes to
        the one that was listed first, and the other is cut around it.
        """
        if self._cells is None:
            holders: dict[Box, dict[int, Slot]] = {}
            for slot, box in self._slots:
                if box.elements:
                    # One slot for each rank: a rank that lists a box twice holds it once.
                    holders.setdefault(box, {}).setdefault(slot[0], slot)
            different = [*holders]
            index, self._cells = Boxes(different), []
            for number, box in enumerate(different):
                left = [box]
                for earlier in index.meeting(box):
                    if earlier < number:
                        left = without(left, different[earlier])
                self._cells += [Cell(each, tuple(holders[box].values())) for each in left]
            self._by_box = Boxes([cell.box for cell in self._cells])
        return self._cells

    def cells(self, box: Box) -> Iterator[Cell]:
        """Yield the cells that meet a box. See `End`."""
        cells = self._disjoint()
        for number in self._by_box.meeting(box):
            yield cells[number]

    def cells_of(self, rank: int) -> Iterator[Cell]:
        """Yield the cells that a rank holds. See `End`."""
        for cell in self._disjoint():
            if any(rank == holder for holder, _ in cell.holders):
                yield cell

    def most_replicated(self) -> tuple[int, int]:
        """Return how many ranks hold the cell that most ranks hold, and the elements of it.

        The number is 1 if no two boxes have an element in common, and at least 2 else. The elements are those of the
        largest such cell.
        """
        cells = self._disjoint()
        several = [cell for cell in cells if len(cell.holders) > 1]
        if several:
            most = max(several, key=lambda cell: (len(cell.holders), cell.box.elements))
            return len(most.holders), most.box.elements
        is_disjoint = sum([cell.box.elements for cell in cells]) == sum([box.elements for _, box in self._slots])
        return (1 if is_disjoint else 2), max([cell.box.elements for cell in cells], default=0)

    def parts(self, box: Box) -> Iterator[tuple[Slot, Box]]:
        """Yield each piece that meets a box, with its part of the box. See `End`."""
        for number in self._index.meeting(box):
            slot, piece = self._slots[number]
            yield slot, piece.meet(box)


class OnMesh:
    """One side that lies on a mesh, in the form of `End`: each rank has one piece, whose number is 0."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._cells: dict[tuple[int, ...], Cell] = {}

    def memory(self, rank: int, number: int) -> Box | None:
        """Return the box of a rank if `number` is 0; None for any other piece, and for a rank outside of the mesh."""
        coordinate = self._side.ranks.coordinate(rank)
        return None if coordinate is None or number else self._side.box(coordinate)

    def held(self, rank: int) -> Iterable[tuple[int, Box]]:
        """Return the boxes that a rank holds, each with the number of its piece. See `End`."""
        coordinate = self._side.ranks.coordinate(rank)
        return () if coordinate is None else ((0, self._side.box(coordinate)),)

    def most_replicated(self) -> tuple[int, int]:
        """Return how many ranks hold each cell, and the elements of the first one. Like `Listed.most_replicated`: on a
        mesh all cells have as many replicas."""
        return self._side.replicas, self._side.box(next(iter(self._side.cells()))).elements

    def _cell(self, cell: tuple[int, ...]) -> Cell:
        """Return a cell with its box and holders. Each cell is made once, since it is the key of a dict."""
        if cell not in self._cells:
            self._cells[cell] = Cell(self._side.box(cell), tuple([(rank, 0) for rank in self._side.holders(cell)]))
        return self._cells[cell]

    def cells(self, box: Box) -> Iterator[Cell]:
        """Yield the cells that meet a box. See `End`."""
        for cell, _ in self._side.parts(box):
            yield self._cell(cell)

    def cells_of(self, rank: int) -> Iterator[Cell]:
        """Yield the cells that a rank holds. See `End`."""
        coordinate = self._side.ranks.coordinate(rank)
        if coordinate is not None:
            yield self._cell(self._side.cell(coordinate))

    def parts(self, box: Box) -> Iterator[tuple[Slot, Box]]:
        """Yield each piece that meets a box, with its part of the box. See `End`."""
        for cell, part in self._side.parts(box):
            for rank in self._side.holders(cell):
                yield (rank, 0), part


class Slab:
    """A box of a side, whose ranks hold nothing else. Their memory is that of their pieces. See `End`."""

    def __init__(self, end: Any, box: Box) -> None:
        self.end, self.box = end, box

    def memory(self, rank: int, number: int) -> Box | None:
        """Return the whole box of a rank's piece of this number; None if it has no such piece. See `End`."""
        return self.end.memory(rank, number)

    def held(self, rank: int) -> Iterable[tuple[int, Box]]:
        """Return the boxes that a rank holds, each with the number of its piece. See `End`."""
        return [(number, box.meet(self.box)) for number, box in self.end.held(rank)]

    def most_replicated(self) -> tuple[int, int]:
        """Return how many ranks hold the cell that most ranks hold, and about how many elements of it are here."""
        ranks, elements = self.end.most_replicated()
        return ranks, min(elements, self.box.elements)

    def cells(self, box: Box) -> Iterator[Cell]:
        """Yield the cells that meet a box. See `End`."""
        return self._cut(self.end.cells(box.meet(self.box)))

    def cells_of(self, rank: int) -> Iterator[Cell]:
        """Yield the cells that a rank holds. See `End`."""
        return self._cut(self.end.cells_of(rank))

    def _cut(self, cells: Iterator[Cell]) -> Iterator[Cell]:
        """Cut cells to the box, and leave out those that are outside."""
        for box, holders in cells:
            inside = box.meet(self.box)
            if inside.elements:
                yield Cell(inside, holders)

    def parts(self, box: Box) -> Iterator[tuple[Slot, Box]]:
        """Yield each piece that meets a box, with its part of the box. See `End`."""
        return self.end.parts(box.meet(self.box))


class Pieced:
    """The plan of one tensor of which a side, or both, are in pieces. Each rank asks for its own part of it.

    Args:
        shape: of the tensor.
        source, target: which rank has which boxes.
        gone: ranks that send nothing.
    """

    def __init__(self, shape: tuple[int, ...], source: End, target: End, gone: frozenset[int] = frozenset()) -> None:
        self.source, self.target, self._gone = source, target, gone
        self._whole = Box((0,) * len(shape), shape)
        self._lines: dict[Cell, tuple[tuple[Slot, ...], list[Want], int]] = {}
        self._routes: dict[int, dict[tuple[int, int], Routes]] = {}  # by rank, as `routes_of` returns them

    def missing(self) -> Box | None:
        """Return the largest box of the tensor of which only ranks that are gone, or none, have something; None if the
        other ranks hold every element."""
        cells = [cell for cell in self.source.cells(self._whole) if not self._gone.issuperset(dict(cell.holders))]
        # Cells don't overlap, so counting is enough to see that nothing is missing. Only an error needs the boxes.
        if sum([cell.box.elements for cell in cells]) == self._whole.elements:
            return None
        left = [self._whole]
        for cell in cells:
            left = without(left, cell.box)
        return max(left, key=lambda box: box.elements)

    def pairs(self, wanted: Iterable[tuple[int, tuple[Box, ...]]]) -> Iterator[tuple[int, int]]:
        """Yield the numbers of a piece of the source and of one of the target between which elements may move.

        Some pairs come more than once. `PieceMove` tells what the numbers mean.
        """
        for rank, boxes in wanted:
            for number, box in enumerate(boxes):
                for source_number, held in self.source.held(rank):
                    if held.meet(box).elements:
                        yield source_number, number
                for cell in self.source.cells(box):
                    for _, source_number in cell.holders:
                        yield source_number, number

    def routes_of(self, rank: int) -> dict[tuple[int, int], Routes]:
        """Return what a rank sends, receives and keeps, by the numbers of the pieces of the source and the target.

        The pieces of a message are numbered as the sender numbers its source and the receiver its target. Computed in
        the first call for a rank.
        """
        if rank not in self._routes:
            self._routes[rank] = self._find(rank)
        return self._routes[rank]

    def _find(self, rank: int) -> dict[tuple[int, int], Routes]:
        """Compute what `routes_of` returns for a rank."""
        by_numbers: dict[tuple[int, int], Routes] = {}

        def at(source: int, target: int) -> Routes:
            """Return the routes of a pair of piece numbers, to add to."""
            return by_numbers.setdefault((source, target), Routes([], [], []))

        # For each piece that this rank wants, the cells with several holders that meet it. A dict is an ordered set.
        shared: dict[int, dict[Cell, None]] = {}
        for number, box in self.target.held(rank):
            left = [box]
            for own, held in self.source.held(rank):
                kept = [common for common in (part.meet(held) for part in left) if common.elements]
                if kept:
                    at(own, number).kept.extend(kept)
                    left = without(left, held)
            if not any(part.elements for part in left):
                continue
            for cell in self.source.cells(box):
                # Which holder sends to this rank depends on all that is wanted of the cell: see below.
                if len(cell.holders) > 1:
                    shared.setdefault(number, {})[cell] = None
                    continue
                # Its only holder sends all of it to everybody, so this rank needn't know who else wants some.
                peer, own = cell.holders[0]
                for part in self._lacks(rank, box.meet(cell.box)):
                    at(own, number).receives.append(Share(peer, part, 0, part.elements))
        for number, cells in shared.items():
            for cell in cells:
                for want, (peer, own), first, last in self._shares(cell):
                    if want.slot == (rank, number):
                        at(own, number).receives.append(Share(peer, want.box, first, last))
        for cell in self.source.cells_of(rank):
            for want, (sender, own), first, last in self._shares(cell):
                if sender == rank:
                    at(own, want.slot[1]).sends.append(Share(want.slot[0], want.box, first, last))
        # Both ends lay out a message in the order of the tensor: a sender finds its shares in another order than a
        # receiver.
        for sends, receives, _ in by_numbers.values():
            sends.sort(key=_order)
            receives.sort(key=_order)
        return by_numbers

    def _lacks(self, rank: int, part: Box) -> list[Box]:
        """Return the parts of a box that a rank doesn't hold in its own pieces of the source."""
        left = [part]
        for _, held in self.source.held(rank):
            left = without(left, held)
        return [box for box in left if box.elements]

    def _line(self, cell: Cell) -> tuple[tuple[Slot, ...], list[Want], int]:
        """Return the line of a cell: the holders that share it, what is wanted of the cell, and how many elements that
        is. Computed in the first call for a cell."""
        if cell not in self._lines:
            wants, begin = [], 0
            for slot, part in self.target.parts(cell.box):
                for box in self._lacks(slot[0], part):
                    wants.append(Want(slot, box, begin))
                    begin += box.elements
            holders = tuple([holder for holder in cell.holders if holder[0] not in self._gone])
            self._lines[cell] = holders, wants, begin
        return self._lines[cell]

    def _shares(self, cell: Cell) -> Iterator[tuple[Want, Slot, int, int]]:
        """Share a cell among its holders, about equally.

        Yields (want, holder, first, last): the holder sends the elements from `first` to `last - 1` of what is wanted,
        counted row-major. A share ends at a multiple of `grain_of`, so with a whole row if there are many, or at the
        end of what is wanted. Needs a holder that isn't gone.
        """
        holders, wants, total = self._line(cell)
        ends = [total * (number + 1) // len(holders) for number in range(len(holders))]
        for want in wants:
            elements, grain, first = want.box.elements, grain_of(want.box), 0
            at = bisect_left(ends, want.begin + 1)
            while first < elements:
                last = min(ends[at] - want.begin, elements)
                last = elements if last == elements else last // grain * grain
                if first < last:
                    yield want, holders[at], first, last
                    first = last
                at += 1


class WithinHosts:
    """The hop of a relay that stays within hosts, with the interface of `Pieced`.

    Args:
        by_rank: for each rank the plan of its host.
        source, target: which rank has which boxes; here only their memory counts.
    """

    def __init__(self, by_rank: Mapping[int, Pieced], source: End, target: End) -> None:
        self._by_rank, self.source, self.target = by_rank, source, target

    def routes_of(self, rank: int) -> dict[tuple[int, int], Routes]:
        """Return what a rank sends, receives and keeps, by the numbers of the pieces of the source and the target;
        empty for a rank of no host. See `Pieced.routes_of`."""
        return self._by_rank[rank].routes_of(rank) if rank in self._by_rank else {}


class PieceMove(NamedTuple):
    """A tensor in pieces, from the pieces with one number to the pieces with another. It has the interface of `Move`.

    A move has one local tensor a rank on each side. So a tensor of which ranks have several pieces needs one move for
    each pair of numbers: (0, 1) moves elements from piece 0 of any rank to piece 1 of any rank.

    Attributes:
        numbers: of the pieces of the source, and of those of the target.
        itemsize: the bytes of an element as it travels.
        members: the ranks of the source, then those of the target.
    """

    pieces: Pieced | WithinHosts
    numbers: tuple[int, int]
    itemsize: int
    members: tuple[int, ...]

    def held(self, rank: int) -> Box | None:
        """Return the box of a rank's piece of the source; None if it has no piece of this number."""
        return self.pieces.source.memory(rank, self.numbers[0])

    def wanted(self, rank: int) -> Box | None:
        """Return the box of a rank's piece of the target; None if it has no piece of this number."""
        return self.pieces.target.memory(rank, self.numbers[1])

    def lost(self, gone: frozenset[int]) -> bool:
        """True if some element of the tensor is held by nobody but ranks that are gone. False for a hop within
        hosts."""
        return isinstance(self.pieces, Pieced) and self.pieces.missing() is not None

    def routes(self, rank: int, send_shares: SendShares) -> Routes:
        """Return what a rank sends, receives and keeps; empty lists if nothing. `send_shares` is for meshes, and isn't
        used."""
        return self.pieces.routes_of(rank).get(self.numbers, Routes([], [], []))


def _order(share: Share) -> tuple[tuple[int, ...], int]:
    """Return the key by which both ends sort the shares of a message."""
    return share.box.start, share.first
