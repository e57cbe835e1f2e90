"""`Relay`: each element leaves the sources once, and ranks that want the same pass it on among themselves.

A relay is a sequence of hops, each planned as a move of pieces (`Pieced`). In the first hop, each element goes to one
of the ranks that want it: a box that several ranks want is cut into stripes, one for each of them (`Striped`). In the
last hop, each rank gets what it lacks from these ranks. Where ranks gave `host=`, a hop in between brings each element
to one rank of each host, and the last hop stays within the hosts. Start at `Relay.of`. Standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .boxes import stripes, without
from .piece_moves import Cell, Listed, OnMesh, Pieced, Slab, WithinHosts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ...distributed.tensor._planner.boxes import Box
    from .piece_moves import End, Slot

STRIPE = 64 << 10  # the least bytes of a stripe: a shorter message costs more than its bytes


class Striped:
    """Which rank has which stripes between two hops: the `End` that is the target of one and the source of the next.

    A cell here is a stripe, and has one holder.

    Args:
        wanted: which rank wants which boxes in the end.
        before: which rank has which boxes before the hop. A rank keeps what it wants and has already, and no stripe is
            made of that.
        itemsize: the bytes of an element.
        turn: which of the ranks that want a box gets the first stripe of it, by its place among them.
        is_in_place: True if a rank may want what it has before the hop.
    """

    def __init__(self, wanted: End, before: End, itemsize: int, turn: int, is_in_place: bool) -> None:
        self._wanted, self._before, self._itemsize, self._turn = wanted, before, itemsize, turn
        self._is_in_place = is_in_place
        self._shared: dict[Box, list[tuple[Slot, Box]]] = {}
        self._held: dict[int, list[tuple[int, Box]]] = {}

    def memory(self, rank: int, number: int) -> Box | None:
        """Return the box of a rank's piece of the target, in whose memory its stripes lie. See `End`."""
        return self._wanted.memory(rank, number)

    def held(self, rank: int) -> Iterable[tuple[int, Box]]:
        """Return the boxes that a rank holds, each with the number of its piece. See `End`."""
        if rank not in self._held:
            boxes = self._held[rank] = []
            for number, box in self._wanted.held(rank) if self._is_in_place else ():
                for _, held in self._before.held(rank):
                    if (part := box.meet(held)).elements:
                        boxes.append((number, part))
            for cell in self.cells_of(rank):
                boxes.append((cell.holders[0][1], cell.box))
        return self._held[rank]

    def cells(self, box: Box) -> Iterator[Cell]:
        """Yield the cells that meet a box. See `End`."""
        for cell in self._wanted.cells(box):
            for slot, part in self._share(cell):
                if part.meet(box).elements:
                    yield Cell(part, (slot,))

    def cells_of(self, rank: int) -> Iterator[Cell]:
        """Yield the cells that a rank holds. See `End`."""
        for cell in self._wanted.cells_of(rank):
            for slot, part in self._share(cell):
                if slot[0] == rank:
                    yield Cell(part, (slot,))

    def parts(self, box: Box) -> Iterator[tuple[Slot, Box]]:
        """Yield each piece that meets a box, with its part of the box. See `End`."""
        for cell in self.cells(box):
            yield cell.holders[0], cell.box.meet(box)

    def _share(self, cell: Cell) -> list[tuple[Slot, Box]]:
        """Cut a cell into stripes, and choose the rank that holds each stripe after this hop. Remembered for each cell.

        With `is_in_place`, parts that one of the ranks already holds stay with it.
        """
        if cell.box not in self._shared:
            left, shares = [cell.box], []
            # What some rank has already stays there, and it passes that on.
            for slot in cell.holders if self._is_in_place else ():
                for _, held in self._before.held(slot[0]):
                    in_place = [common for common in (box.meet(held) for box in left) if common.elements]
                    if in_place:
                        shares += [(slot, box) for box in in_place]
                        left = without(left, held)
            rank_count = len(cell.holders)
            for box in left:
                count = stripe_count(box.elements * self._itemsize, rank_count)
                for number, stripe in enumerate(stripes(box, count)):
                    shares.append((cell.holders[(self._turn + number) % rank_count], stripe))
            self._shared[cell.box] = shares
        return self._shared[cell.box]


def stripe_count(size: int, rank_count: int) -> int:
    """Return into how many stripes a box is cut: one for each rank that wants it, but none shorter than STRIPE."""
    return min(max(size // STRIPE, 1), rank_count)


def among(end: Listed | OnMesh | Slab, ranks: frozenset[int]) -> End:
    """Return the end with these ranks alone. Cells are cut anew for them."""
    if isinstance(end, Slab):
        return Slab(among(end.end, ranks), end.box)
    # Where listed boxes overlap, the overlap belongs to one of them. That must be one of these ranks, so cells are cut
    # anew.
    return end.among(ranks) if isinstance(end, Listed) else Among(end, ranks)


class Among:
    """A side on a mesh with these ranks alone. See `End`."""

    def __init__(self, end: OnMesh, ranks: frozenset[int]) -> None:
        self._end, self._ranks = end, ranks

    def memory(self, rank: int, number: int) -> Box | None:
        """Return the box of a rank's piece of this number; None if it has no such piece. See `End`."""
        return self._end.memory(rank, number) if rank in self._ranks else None

    def held(self, rank: int) -> Iterable[tuple[int, Box]]:
        """Return the boxes that a rank holds, each with the number of its piece. See `End`."""
        return self._end.held(rank) if rank in self._ranks else ()

    def cells(self, box: Box) -> Iterator[Cell]:
        """Yield the cells that meet a box. See `End`."""
        return self._left(self._end.cells(box))

    def cells_of(self, rank: int) -> Iterator[Cell]:
        """Yield the cells that a rank holds. See `End`."""
        return self._left(self._end.cells_of(rank)) if rank in self._ranks else iter(())

    def _left(self, cells: Iterable[Cell]) -> Iterator[Cell]:
        """Yield the cells with those of their holders that are among these ranks, if there are some."""
        for box, holders in cells:
            left = tuple([slot for slot in holders if slot[0] in self._ranks])
            if left:
                yield Cell(box, left)

    def parts(self, box: Box) -> Iterator[tuple[Slot, Box]]:
        """Yield each piece that meets a box, with its part of the box. See `End`."""
        for slot, part in self._end.parts(box):
            if slot[0] in self._ranks:
                yield slot, part


class Joined:
    """An `End` put together from the ends of several disjoint sets of ranks, as of the hosts of a relay.

    Args:
        by_rank: for each rank the end of its set.
    """

    def __init__(self, by_rank: Mapping[int, End]) -> None:
        self._by_rank = by_rank
        self._ends = [*{id(end): end for end in by_rank.values()}.values()]

    def memory(self, rank: int, number: int) -> Box | None:
        """Return the box of a rank's piece of this number; None if it has no such piece. See `End`."""
        return self._by_rank[rank].memory(rank, number) if rank in self._by_rank else None

    def held(self, rank: int) -> Iterable[tuple[int, Box]]:
        """Return the boxes that a rank holds, each with the number of its piece. See `End`."""
        return self._by_rank[rank].held(rank) if rank in self._by_rank else ()

    def cells(self, box: Box) -> Iterator[Cell]:
        """Yield the cells that meet a box. See `End`."""
        for end in self._ends:
            yield from end.cells(box)

    def cells_of(self, rank: int) -> Iterator[Cell]:
        """Yield the cells that a rank holds. See `End`."""
        return self._by_rank[rank].cells_of(rank) if rank in self._by_rank else iter(())

    def parts(self, box: Box) -> Iterator[tuple[Slot, Box]]:
        """Yield each piece that meets a box, with its part of the box. See `End`."""
        for end in self._ends:
            yield from end.parts(box)


class Relay(NamedTuple):
    """How one tensor is passed on.

    Attributes:
        first: which rank has which stripes after the first hop. It is the target of that hop.
        hops: the plans of the other hops, in order.
    """

    first: Striped
    hops: tuple[Pieced | WithinHosts, ...]

    @staticmethod
    def of(
        shape: tuple[int, ...],
        ends: tuple[End, Listed | OnMesh | Slab],
        itemsize: int,
        turn: int,
        is_in_place: bool,
        hosts: Mapping[int, str],
    ) -> Relay:
        """Plan the hops of one tensor."""
        source, target = ends
        first = Striped(target, source, itemsize, turn, is_in_place)
        if not hosts:
            return Relay(first, (Pieced(shape, first, target),))
        by_host: dict[str, list[int]] = {}
        for rank, host in hosts.items():
            by_host.setdefault(host, []).append(rank)
        striped_on_host: dict[int, End] = {}
        within_host: dict[int, Pieced] = {}
        for ranks in by_host.values():
            wanted = among(target, frozenset(ranks))
            # After the first hop, a rank of this host may have a stripe of what the host wants. It isn't sent again.
            striped = Striped(wanted, first, itemsize, turn, True)
            striped_on_host |= dict.fromkeys(ranks, striped)
            within_host |= dict.fromkeys(ranks, Pieced(shape, striped, wanted))
        return Relay(first, (Pieced(shape, first, Joined(striped_on_host)), WithinHosts(within_host, target, target)))


class Turns:
    """Whose turn it is to get the first stripe of a tensor.

    A small tensor has fewer stripes than ranks want it. Without turns, the first rank would get all of these, and send
    them to all others. Every rank counts the same turns.
    """

    def __init__(self) -> None:
        self._loads: dict[int, list[int]] = {}  # for each count of ranks that want a tensor, the bytes that each got

    def next(self, end: Listed | OnMesh | Slab, itemsize: int) -> int | None:
        """Return the turn of the next tensor, and count the bytes that it gives to ranks: the place, among the ranks
        that want it, of the one with the least so far. None if no two ranks want an element of it, so that it needs no
        relay."""
        rank_count, elements = end.most_replicated()
        if rank_count == 1:
            return None
        count = stripe_count(elements * itemsize, rank_count)
        # Each rank that wants the tensor gets a stripe, so that no turn is needed.
        if count == rank_count:
            return 0
        loads = self._loads.setdefault(rank_count, [0] * rank_count)
        turn = loads.index(min(loads))
        for number in range(count):
            loads[(turn + number) % rank_count] += elements * itemsize // count
        return turn
