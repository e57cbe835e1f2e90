"""`Pieced` and `PieceMove`: one tensor of which ranks hold any boxes, and no mesh says which. Start at
`Pieced.routes_of`.

The source's boxes are cut into cells that don't overlap, each with the ranks that hold it. All that is wanted of a cell
is laid out on a line, part by part, and the holders share the line evenly. A rank isn't sent what it holds itself. A
sender looks up who wants its cells, a receiver who holds what it wants, and both compute the same shares. Lists of
boxes (`Listed`) and a mesh (`OnMesh`) answer the same questions (`End`), so that each side may be either. Standard
library only.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

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
    """Which rank holds which boxes of one tensor: its source, its target, or what ranks have between two hops of a
    relay. A mesh says it by arithmetic (`OnMesh`), anything else is a list (`Listed`).

    All boxes are of the whole tensor. A rank's boxes lie in its pieces, which have numbers.
    """

    def held(self, rank: int) -> Iterable[tuple[int, Box]]:
        """Return the boxes that a rank holds, each with the number of the piece in which it lies."""

    def cells(self, box: Box) -> Iterator[Cell]:
        """Yield the cells that meet a box, in one order on every rank."""

    def cells_of(self, rank: int) -> Iterator[Cell]:
        """Yield the cells that a rank holds, in the order of `cells`."""

    def parts(self, box: Box) -> Iterator[tuple[Slot, Box]]:
        """Yield each box that meets a box, as its piece and the part that it has."""

    def most_replicated(self) -> tuple[int, int]:
        """Return how many ranks hold the cell that most ranks hold, and the elements of the largest such cell. The
        number is 1 if no two boxes have an element in common, and at least 2 else."""


class Listed:
    """An `End` by a list.

    Args:
        given: pairs of a rank and its boxes, each with the number of its piece. Boxes may overlap and may be empty.
    """

    def __init__(self, given: Iterable[tuple[int, Iterable[tuple[int, Box]]]]) -> None:
        self._held = {rank: [*boxes] for rank, boxes in given}

    def held(self, rank: int) -> Iterable[tuple[int, Box]]:
        """See `End`."""
        return self._held.get(rank, ())

    @cached_property
    def _slots(self) -> list[tuple[Slot, Box]]:
        return [((rank, number), box) for rank, boxes in self._held.items() for number, box in boxes]

    @cached_property
    def _index(self) -> Boxes:
        return Boxes([box for _, box in self._slots])

    @cached_property
    def _cells(self) -> list[Cell]:
        """The cells of this side: boxes that don't overlap, and together cover all that is listed.

        Equal boxes are one cell, and all their ranks hold it. Where two different boxes overlap, the overlap goes to
        the one that was listed first, and the other is cut around it.
        """
        holders: dict[Box, dict[int, Slot]] = {}
        for slot, box in self._slots:
            if box.elements:
                # One slot for each rank: a rank that lists a box twice holds it once.
                holders.setdefault(box, {}).setdefault(slot[0], slot)
        different, cells = [*holders], list[Cell]()
        index = Boxes(different)
        for number, box in enumerate(different):
            left = [box]
            for earlier in index.meeting(box):
                if earlier < number:
                    left = without(left, different[earlier])
            cells += [Cell(each, tuple(holders[box].values())) for each in left]
        return cells

    @cached_property
    def _by_box(self) -> Boxes:
        return Boxes([cell.box for cell in self._cells])

    def cells(self, box: Box) -> Iterator[Cell]:
        """See `End`."""
        for number in self._by_box.meeting(box):
            yield self._cells[number]

    def cells_of(self, rank: int) -> Iterator[Cell]:
        """See `End`."""
        for cell in self._cells:
            if any(rank == holder for holder, _ in cell.holders):
                yield cell

    def most_replicated(self) -> tuple[int, int]:
        """See `End`."""
        cells = self._cells
        several = [cell for cell in cells if len(cell.holders) > 1]
        if several:
            most = max(several, key=lambda cell: (len(cell.holders), cell.box.elements))
            return len(most.holders), most.box.elements
        is_disjoint = sum([cell.box.elements for cell in cells]) == sum([box.elements for _, box in self._slots])
        return (1 if is_disjoint else 2), max([cell.box.elements for cell in cells], default=0)

    def parts(self, box: Box) -> Iterator[tuple[Slot, Box]]:
        """See `End`."""
        for number in self._index.meeting(box):
            slot, piece = self._slots[number]
            yield slot, piece.meet(box)


class OnMesh:
    """An `End` on a mesh: each rank has one piece, whose number is 0."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._cells: dict[tuple[int, ...], Cell] = {}

    def held(self, rank: int) -> Iterable[tuple[int, Box]]:
        """See `End`."""
        coordinate = self._side.ranks.coordinate(rank)
        return () if coordinate is None else ((0, self._side.box(coordinate)),)

    def most_replicated(self) -> tuple[int, int]:
        """See `End`. On a mesh all cells have as many replicas."""
        return self._side.replicas, self._side.box(next(iter(self._side.cells()))).elements

    def _cell(self, cell: tuple[int, ...]) -> Cell:
        """Return a cell with its box and holders. Each cell is made once, since it is the key of a dict."""
        if cell not in self._cells:
            self._cells[cell] = Cell(self._side.box(cell), tuple([(rank, 0) for rank in self._side.holders(cell)]))
        return self._cells[cell]

    def cells(self, box: Box) -> Iterator[Cell]:
        """See `End`."""
        for cell, _ in self._side.parts(box):
            yield self._cell(cell)

    def cells_of(self, rank: int) -> Iterator[Cell]:
        """See `End`."""
        coordinate = self._side.ranks.coordinate(rank)
        if coordinate is not None:
            yield self._cell(self._side.cell(coordinate))

    def parts(self, box: Box) -> Iterator[tuple[Slot, Box]]:
        """See `End`."""
        for cell, part in self._side.parts(box):
            for rank in self._side.holders(cell):
                yield (rank, 0), part


def clipped(end: End, ranks: Iterable[int], box: Box | None = None) -> Listed:
    """Return what these ranks hold of an end; with a box, of this box of the tensor alone."""
    return Listed(
        [
            (rank, [(number, held if box is None else held.meet(box)) for number, held in end.held(rank)])
            for rank in ranks
        ]
    )


class Pieced:
    """The plan of one tensor of which a side, or both, are in pieces. Each rank asks for its own part of it.

    Args:
        shape: of the tensor.
        source, target: which rank has which boxes.
        gone: ranks that send nothing.
        memory: for both sides, the pieces in whose memory the boxes lie, where these aren't the pieces.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        source: End,
        target: End,
        gone: frozenset[int] = frozenset(),
        memory: tuple[End, End] | None = None,
    ) -> None:
        self.source, self.target, self._gone = source, target, gone
        self.memory = memory or (source, target)
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
    """The hop of a relay that stays within hosts: for each rank the plan of its host. Used as a `Pieced`."""

    def __init__(self, by_rank: Mapping[int, Pieced], memory: tuple[End, End]) -> None:
        self._by_rank, self.memory = by_rank, memory

    def routes_of(self, rank: int) -> dict[tuple[int, int], Routes]:
        """See `Pieced.routes_of`. Empty for a rank of no host."""
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
        return dict(self.pieces.memory[0].held(rank)).get(self.numbers[0])

    def wanted(self, rank: int) -> Box | None:
        """Return the box of a rank's piece of the target; None if it has no piece of this number."""
        return dict(self.pieces.memory[1].held(rank)).get(self.numbers[1])

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
