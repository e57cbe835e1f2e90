"""Pieced: who sends what where ranks hold any boxes of a tensor, and no mesh says which.

Who has what is a list, so a plan is made from lists: the source's boxes are cut into cells that don't overlap, each
with the ranks that hold it; what is wanted of a cell follows one another on a line, part by part; and the holders share
the line evenly. What a rank holds itself isn't sent to it. A sender finds the parts of its cells, a receiver the cells
of its parts, and both find the same. A side on a mesh answers the same questions by arithmetic. Standard library only.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ...distributed.tensor._planner.regions import Box
from .routes import Routes, Share, grain_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .relay import WithinHosts
    from .routes import Weights
    from .sides import Side

Slot = tuple[int, int]  # a rank, and the number of one of its pieces


class Cell(NamedTuple):
    """A box of the source, which meets no other one.

    Attributes:
        holders: in whose pieces it lies.
    """

    box: Box
    holders: tuple[Slot, ...]


class Want(NamedTuple):
    """What a piece of the target wants of a cell and its rank lacks.

    Attributes:
        begin: where it begins on the cell's line, in elements.
    """

    slot: Slot
    box: Box
    begin: int


class End(Protocol):
    """Which rank has which boxes of one tensor, in its source or in its target."""

    def memory(self, rank: int, number: int) -> Box | None:
        """The box that a rank's piece of this number has memory for; None if it has no such piece."""

    def held(self, rank: int) -> Iterable[tuple[int, Box]]:
        """The boxes of a rank, each with the number of the piece in which it lies."""

    def cells(self, box: Box) -> Iterator[Cell]:
        """The cells that meet a box, always in the same order."""

    def cells_of(self, rank: int) -> Iterator[Cell]:
        """The cells that a rank holds, in that order."""

    def parts(self, box: Box) -> Iterator[tuple[Slot, Box]]:
        """What each piece has of a box."""


def without(boxes: Iterable[Box], hole: Box) -> list[Box]:
    """What is left of boxes when one is cut out, in boxes.

    >>> without([Box((0, 0), (3, 3))], Box((1, 1), (1, 9)))
    [Box(start=(0, 0), length=(1, 3)), Box(start=(2, 0), length=(1, 3)), Box(start=(1, 0), length=(1, 1))]
    """
    found: list[Box] = []
    for box in boxes:
        cut = box.meet(hole)
        if not cut.elements:
            found.append(box)
            continue
        start, length = [*box.start], [*box.length]
        for dim, (first, many) in enumerate(zip(*cut)):
            end, beyond = first + many, start[dim] + length[dim]
            for low, high in ((start[dim], first), (end, beyond)):
                if low < high:
                    found.append(
                        Box((*start[:dim], low, *start[dim + 1 :]), (*length[:dim], high - low, *length[dim + 1 :]))
                    )
            start[dim], length[dim] = first, many
    return found


class Boxes:
    """Boxes, to be asked which of them meet another one: sorted along the dim in which they differ most."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        dims = range(len(boxes[0].start) if boxes else 0)
        self._dim = max(dims, key=lambda dim: len({box.start[dim] for box in boxes}), default=None)
        if self._dim is not None:
            dim = self._dim
            self._order = sorted(range(len(boxes)), key=lambda number: boxes[number].start[dim])
            self._starts = [boxes[number].start[dim] for number in self._order]
            self._longest = max([box.length[dim] for box in boxes], default=0)

    def meeting(self, box: Box) -> list[int]:
        """The numbers of those that have an element of a box, ascending."""
        if self._dim is None:
            near: Iterable[int] = range(len(self._boxes))
        else:
            low = bisect_left(self._starts, box.start[self._dim] - self._longest + 1)
            high = bisect_left(self._starts, box.start[self._dim] + box.length[self._dim])
            near = sorted(self._order[low:high])
        return [number for number in near if self._boxes[number].meet(box).elements]


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
        """The same without the ranks that aren't in a set."""
        return Listed([(rank, boxes) for rank, boxes in self._held.items() if rank in ranks])

    def memory(self, rank: int, number: int) -> Box | None:
        """See `End`."""
        boxes = self._held.get(rank, ())
        return boxes[number] if number < len(boxes) else None

    def held(self, rank: int) -> Iterable[tuple[int, Box]]:
        """See `End`."""
        return enumerate(self._held.get(rank, ()))

    def _disjoint(self) -> list[Cell]:
        """The cells of this side: boxes that don't overlap, and together cover all that is listed. Computed once.

        Equal boxes are one cell, and all their ranks hold it. Where two different boxes overlap, the overlap goes to
        the one that was listed first, and the other is cut around it."""
        if self._cells is None:
            holders: dict[Box, dict[int, Slot]] = {}
            for slot, box in self._slots:
                if box.elements:
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
        """See `End`."""
        cells = self._disjoint()
        for number in self._by_box.meeting(box):
            yield cells[number]

    def cells_of(self, rank: int) -> Iterator[Cell]:
        """See `End`."""
        for cell in self._disjoint():
            if any(rank == holder for holder, _ in cell.holders):
                yield cell

    def crowd(self) -> tuple[int, int]:
        """How many ranks hold the box that most ranks hold, 1 if no two boxes have an element in common; and its
        elements."""
        cells = self._disjoint()
        several = [cell for cell in cells if len(cell.holders) > 1]
        if several:
            most = max(several, key=lambda cell: (len(cell.holders), cell.box.elements))
            return len(most.holders), most.box.elements
        apart = sum([cell.box.elements for cell in cells]) == sum([box.elements for _, box in self._slots])
        return (1 if apart else 2), max([cell.box.elements for cell in cells], default=0)

    def parts(self, box: Box) -> Iterator[tuple[Slot, Box]]:
        """See `End`."""
        for number in self._index.meeting(box):
            slot, piece = self._slots[number]
            yield slot, piece.meet(box)


class OnMesh:
    """One side on a mesh: each rank has one piece."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._cells: dict[tuple[int, ...], Cell] = {}

    def memory(self, rank: int, number: int) -> Box | None:
        """The box of a rank, if `number` is 0; None for any other piece, and for a rank outside of the mesh."""
        coordinate = self._side.ranks.coordinate(rank)
        return None if coordinate is None or number else self._side.box(coordinate)

    def held(self, rank: int) -> Iterable[tuple[int, Box]]:
        """See `End`."""
        coordinate = self._side.ranks.coordinate(rank)
        return () if coordinate is None else ((0, self._side.box(coordinate)),)

    def crowd(self) -> tuple[int, int]:
        """How many ranks hold each box, and the elements of the first one."""
        return self._side.replicas, self._side.box(next(iter(self._side.cells()))).elements

    def _cell(self, cell: tuple[int, ...]) -> Cell:
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


class Pieced:
    """One tensor of which a side, or both, are pieces.

    Args:
        shape: of the tensor.
        source, target: who has what.
        gone: ranks that send nothing.
    """

    def __init__(self, shape: tuple[int, ...], source: End, target: End, gone: frozenset[int] = frozenset()) -> None:
        self.source, self.target, self._gone = source, target, gone
        self._whole = Box((0,) * len(shape), shape)
        self._lines: dict[Cell, tuple[tuple[Slot, ...], list[Want], int]] = {}
        self._found: dict[int, dict[tuple[int, int], Routes]] = {}

    def missing(self) -> Box | None:
        """The largest box of the tensor that no rank has that isn't gone; None if all is there."""
        cells = [cell for cell in self.source.cells(self._whole) if not self._gone.issuperset(dict(cell.holders))]
        if sum([cell.box.elements for cell in cells]) == self._whole.elements:
            return None
        left = [self._whole]
        for cell in cells:
            left = without(left, cell.box)
        return max(left, key=lambda box: box.elements)

    def pairs(self, wanted: Iterable[tuple[int, tuple[Box, ...]]]) -> Iterator[tuple[int, int]]:
        """The numbers of pieces of the source and of the target that meet, some of them more than once."""
        for rank, boxes in wanted:
            for number, box in enumerate(boxes):
                for own, held in self.source.held(rank):
                    if held.meet(box).elements:
                        yield own, number
                for cell in self.source.cells(box):
                    for _, other in cell.holders:
                        yield other, number

    def of(self, rank: int) -> dict[tuple[int, int], Routes]:
        """What a rank does, by the numbers of the piece of the source and of that of the target."""
        if rank not in self._found:
            self._found[rank] = self._find(rank)
        return self._found[rank]

    def _find(self, rank: int) -> dict[tuple[int, int], Routes]:
        found: dict[tuple[int, int], Routes] = {}

        def at(source: int, target: int) -> Routes:
            return found.setdefault((source, target), Routes([], [], []))

        shared: dict[int, dict[Cell, None]] = {}  # cells of several holders, once for each piece of this rank
        for number, box in self.target.held(rank):
            left = [box]
            for own, held in self.source.held(rank):
                here = [meets for meets in (each.meet(held) for each in left) if meets.elements]
                if here:
                    at(own, number).kept.extend(here)
                    left = without(left, held)
            if not any(each.elements for each in left):
                continue
            for cell in self.source.cells(box):
                if len(cell.holders) > 1:
                    shared.setdefault(number, {})[cell] = None
                    continue
                peer, own = cell.holders[0]  # it sends all of the cell, whoever else wants some of it
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
        for sends, receives, _ in found.values():  # both ends lay out a message in the order of the tensor
            sends.sort(key=_order)
            receives.sort(key=_order)
        return found

    def _lacks(self, rank: int, part: Box) -> list[Box]:
        """What of a box a rank hasn't in its pieces of the source."""
        left = [part]
        for _, held in self.source.held(rank):
            left = without(left, held)
        return [box for box in left if box.elements]

    def _line(self, cell: Cell) -> tuple[tuple[Slot, ...], list[Want], int]:
        """Who sends of a cell, what is wanted of it, and how much that is."""
        if cell not in self._lines:
            parts, begin = [], 0
            for slot, part in self.target.parts(cell.box):
                for box in self._lacks(slot[0], part):
                    parts.append(Want(slot, box, begin))
                    begin += box.elements
            holders = tuple([holder for holder in cell.holders if holder[0] not in self._gone])
            self._lines[cell] = holders, parts, begin
        return self._lines[cell]

    def _shares(self, cell: Cell) -> Iterator[tuple[Want, Slot, int, int]]:
        """Share a cell among its holders, about equally. Yields (part, holder, first, last): the holder sends the
        elements from `first` to `last - 1` of a part that some target wants. A share ends at a multiple of
        `grain_of(part)`, or where the part does. Needs a holder that isn't gone."""
        holders, parts, total = self._line(cell)
        ends = [total * (number + 1) // len(holders) for number in range(len(holders))]
        for part in parts:
            elements, grain, first = part.box.elements, grain_of(part.box), 0
            at = bisect_left(ends, part.begin + 1)
            while first < elements:
                last = min(ends[at] - part.begin, elements)
                last = elements if last == elements else last // grain * grain
                if first < last:
                    yield part, holders[at], first, last
                    first = last
                at += 1


class PieceMove(NamedTuple):
    """The way from one piece of a rank to one of another rank, by their numbers; the pieces of a tensor need one for
    each two numbers. See `Move`."""

    pieces: Pieced | WithinHosts
    numbers: tuple[int, int]
    itemsize: int
    members: tuple[int, ...]

    def held(self, rank: int) -> Box | None:
        """What a rank has memory for of the source."""
        return self.pieces.source.memory(rank, self.numbers[0])

    def wanted(self, rank: int) -> Box | None:
        """What a rank has memory for of the target."""
        return self.pieces.target.memory(rank, self.numbers[1])

    def lost(self, gone: frozenset[int]) -> bool:
        """Whether some element is on ranks only that are gone."""
        return isinstance(self.pieces, Pieced) and self.pieces.missing() is not None

    def routes(self, rank: int, weights: Weights) -> Routes:
        """What a rank sends, gets and has already. Shares don't depend on other tensors."""
        return self.pieces.of(rank).get(self.numbers, Routes([], [], []))


class PlannedMove:
    """What one rank has to do with a `PieceMove` that another rank planned. Tensors that lie alike have one object, and
    travel together."""

    members: tuple[int, ...] = ()
    __slots__ = ("_held", "_routes", "_wanted", "itemsize")

    def __init__(self, held: Box | None, wanted: Box | None, routes: Routes, itemsize: int) -> None:
        self._held, self._wanted, self._routes, self.itemsize = held, wanted, routes, itemsize

    def held(self, rank: int) -> Box | None:
        """What this rank has of the source."""
        return self._held

    def wanted(self, rank: int) -> Box | None:
        """What it wants."""
        return self._wanted

    def lost(self, gone: frozenset[int]) -> bool:
        """Whether some element is on ranks only that are gone: the planner has said so."""
        return False

    def routes(self, rank: int, weights: Weights) -> Routes:
        """What it sends, gets and has already."""
        return self._routes


def _order(share: Share) -> tuple[tuple[int, ...], int]:
    return share.box.start, share.first
