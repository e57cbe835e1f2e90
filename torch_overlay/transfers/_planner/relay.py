"""Relays: each element leaves the source once, and ranks that want the same pass it on among themselves.

A relay is a row of transfers, its hops, each planned as any other one (`Pieced`). After the first hop each element is
on one of the ranks that want it: a box that several ranks want is cut into stripes, one for each of them (`Striped`).
The last hop brings each rank what it lacks, from those ranks. Where ranks say on which host they are, a hop in
between brings each element to one rank of each host, and the last one stays within the hosts. Standard library only.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from .piece_moves import Cell, Listed, OnMesh, Pieced, without

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ...distributed.tensor._planner.regions import Box
    from .piece_moves import End, Slot
    from .routes import Routes

STRIPE = 64 << 10  # bytes of the shortest stripe: shorter messages cost more than their bytes
EVEN = 16  # elements of a dim for each stripe with which stripes are nearly equal


def stripes(box: Box, count: int) -> list[Box]:
    """A box in so many boxes along one dim, of lengths that differ by one at most; fewer if no dim is long enough.

    The first dim that gives nearly equal stripes is cut, since a stripe of rows lies in one stretch of memory.

    >>> from torch_overlay.distributed.tensor._planner.regions import Box
    >>> stripes(Box((0, 0), (2, 6)), 3)
    [Box(start=(0, 0), length=(2, 2)), Box(start=(0, 2), length=(2, 2)), Box(start=(0, 4), length=(2, 2))]
    """
    if count == 1 or box.elements < 2:
        return [box]
    lengths = box.length
    even = [dim for dim, length in enumerate(lengths) if length % count == 0 or length >= EVEN * count]
    dim = even[0] if even else max(range(len(lengths)), key=lengths.__getitem__)
    count, start = min(count, lengths[dim]), box.start[dim]
    ends = [lengths[dim] * number // count for number in range(count + 1)]
    return [
        box._replace(
            start=(*box.start[:dim], start + low, *box.start[dim + 1 :]),
            length=(*lengths[:dim], high - low, *lengths[dim + 1 :]),
        )
        for low, high in itertools.pairwise(ends)
    ]


class Striped:
    """Which rank of those that want an element has it after a hop: an `End` of the transfer of that hop, and of the
    next one.

    Args:
        wanted: who wants what in the end.
        before: who has what before the hop. A rank keeps what it wants and has already: no stripe is made of that.
        itemsize: the bytes of an element.
        turn: the number, among the ranks that want a box, of the one that gets the first stripe of it.
        is_in_place: whether some rank may want what it has before the hop.
    """

    def __init__(self, wanted: End, before: End, itemsize: int, turn: int, is_in_place: bool) -> None:
        self._wanted, self._before, self._itemsize, self._turn = wanted, before, itemsize, turn
        self._is_in_place = is_in_place
        self._shared: dict[Box, list[tuple[Slot, Box]]] = {}
        self._held: dict[int, list[tuple[int, Box]]] = {}

    def memory(self, rank: int, number: int) -> Box | None:
        """See `End`: a stripe lies in the piece of which it is a part."""
        return self._wanted.memory(rank, number)

    def held(self, rank: int) -> Iterable[tuple[int, Box]]:
        """See `End`."""
        if rank not in self._held:
            found = self._held[rank] = []
            for number, box in self._wanted.held(rank) if self._is_in_place else ():
                for _, held in self._before.held(rank):
                    if (part := box.meet(held)).elements:
                        found.append((number, part))
            for cell in self.cells_of(rank):
                found.append((cell.holders[0][1], cell.box))
        return self._held[rank]

    def cells(self, box: Box) -> Iterator[Cell]:
        """See `End`."""
        for cell in self._wanted.cells(box):
            for slot, part in self._share(cell):
                if part.meet(box).elements:
                    yield Cell(part, (slot,))

    def cells_of(self, rank: int) -> Iterator[Cell]:
        """See `End`."""
        for cell in self._wanted.cells_of(rank):
            for slot, part in self._share(cell):
                if slot[0] == rank:
                    yield Cell(part, (slot,))

    def parts(self, box: Box) -> Iterator[tuple[Slot, Box]]:
        """See `End`."""
        for cell in self.cells(box):
            yield cell.holders[0], cell.box.meet(box)

    def _share(self, cell: Cell) -> list[tuple[Slot, Box]]:
        """Who has which part of a box that several ranks want: each element is in one of the parts."""
        if cell.box not in self._shared:
            left, found = [cell.box], []
            for slot in cell.holders if self._is_in_place else ():
                for _, held in self._before.held(slot[0]):
                    here = [meets for meets in (box.meet(held) for box in left) if meets.elements]
                    if here:
                        found += [(slot, box) for box in here]
                        left = without(left, held)
            many = len(cell.holders)
            for box in left:
                count = stripe_count(box.elements * self._itemsize, many)
                for number, stripe in enumerate(stripes(box, count)):
                    found.append((cell.holders[(self._turn + number) % many], stripe))
            self._shared[cell.box] = found
        return self._shared[cell.box]


def stripe_count(size: int, many: int) -> int:
    """Into how many stripes a box of so many bytes is cut that as many ranks want."""
    return min(max(size // STRIPE, 1), many)


def among(end: Listed | OnMesh, ranks: frozenset[int]) -> End:
    """An end without the ranks that aren't in a set."""
    # Of boxes that overlap the elements in common belong to one of them. That has to be one of these ranks.
    return end.among(ranks) if isinstance(end, Listed) else Among(end, ranks)


class Among:
    """A side on a mesh without the ranks that aren't in a set."""

    def __init__(self, end: OnMesh, ranks: frozenset[int]) -> None:
        self._end, self._ranks = end, ranks

    def memory(self, rank: int, number: int) -> Box | None:
        """See `End`."""
        return self._end.memory(rank, number) if rank in self._ranks else None

    def held(self, rank: int) -> Iterable[tuple[int, Box]]:
        """See `End`."""
        return self._end.held(rank) if rank in self._ranks else ()

    def cells(self, box: Box) -> Iterator[Cell]:
        """See `End`."""
        return self._left(self._end.cells(box))

    def cells_of(self, rank: int) -> Iterator[Cell]:
        """See `End`."""
        return self._left(self._end.cells_of(rank)) if rank in self._ranks else iter(())

    def _left(self, cells: Iterable[Cell]) -> Iterator[Cell]:
        for box, holders in cells:
            left = tuple([slot for slot in holders if slot[0] in self._ranks])
            if left:
                yield Cell(box, left)

    def parts(self, box: Box) -> Iterator[tuple[Slot, Box]]:
        """See `End`."""
        for slot, part in self._end.parts(box):
            if slot[0] in self._ranks:
                yield slot, part


class Joined:
    """An `End` of ranks in several sets, each with an `End` of its own."""

    def __init__(self, by_rank: Mapping[int, End]) -> None:
        self._by_rank = by_rank
        self._ends = [*{id(end): end for end in by_rank.values()}.values()]

    def memory(self, rank: int, number: int) -> Box | None:
        """See `End`."""
        return self._by_rank[rank].memory(rank, number) if rank in self._by_rank else None

    def held(self, rank: int) -> Iterable[tuple[int, Box]]:
        """See `End`."""
        return self._by_rank[rank].held(rank) if rank in self._by_rank else ()

    def cells(self, box: Box) -> Iterator[Cell]:
        """See `End`."""
        for end in self._ends:
            yield from end.cells(box)

    def cells_of(self, rank: int) -> Iterator[Cell]:
        """See `End`."""
        return self._by_rank[rank].cells_of(rank) if rank in self._by_rank else iter(())

    def parts(self, box: Box) -> Iterator[tuple[Slot, Box]]:
        """See `End`."""
        for end in self._ends:
            yield from end.parts(box)


class WithinHosts:
    """Transfers that stay within hosts, in place of a `Pieced`: each rank has a part in that of its host alone."""

    def __init__(self, by_rank: Mapping[int, Pieced], source: End, target: End) -> None:
        self._by_rank, self.source, self.target = by_rank, source, target

    def of(self, rank: int) -> dict[tuple[int, int], Routes]:
        """See `Pieced.of`."""
        return self._by_rank[rank].of(rank) if rank in self._by_rank else {}


class Relay(NamedTuple):
    """How one tensor is passed on.

    Attributes:
        first: who has what after the first hop, for which it is the target.
        hops: the others, in order.
    """

    first: Striped
    hops: tuple[Pieced | WithinHosts, ...]

    @staticmethod
    def of(
        shape: tuple[int, ...],
        ends: tuple[End, Listed | OnMesh],
        itemsize: int,
        turn: int,
        is_in_place: bool,
        hosts: Mapping[int, str],
    ) -> Relay:
        """The relay between two ends.

        Args:
            turn: see `Striped`.
            is_in_place: whether a rank may have some of what it wants.
            hosts: the ranks that want something and said where they are, and what they said.
        """
        source, target = ends
        first = Striped(target, source, itemsize, turn, is_in_place)
        if not hosts:
            return Relay(first, (Pieced(shape, first, target),))
        by_host: dict[str, list[int]] = {}
        for rank, host in hosts.items():
            by_host.setdefault(host, []).append(rank)
        onto: dict[int, End] = {}
        within: dict[int, Pieced] = {}
        for ranks in by_host.values():
            wanted = among(target, frozenset(ranks))
            on_host = Striped(wanted, first, itemsize, turn, True)
            inside = Pieced(shape, on_host, wanted)
            onto |= dict.fromkeys(ranks, on_host)
            within |= dict.fromkeys(ranks, inside)
        return Relay(first, (Pieced(shape, first, Joined(onto)), WithinHosts(within, target, target)))


class Turns:
    """Whose turn it is to get a box, or a few stripes of one, so that small boxes are spread over the ranks that want
    them. Every rank counts alike."""

    def __init__(self) -> None:
        self._loads: dict[int, list[int]] = {}  # by the number of ranks that want a box, what each of them got

    def next(self, end: Listed | OnMesh, itemsize: int) -> int | None:
        """The turn of a tensor, by who wants it; None if nobody wants what another rank wants."""
        many, elements = end.crowd()
        if many == 1:
            return None
        count = stripe_count(elements * itemsize, many)
        if count == many:
            return 0
        loads = self._loads.setdefault(many, [0] * many)
        turn = loads.index(min(loads))
        for number in range(count):
            loads[(turn + number) % many] += elements * itemsize // count
        return turn
