"""`Relay`: each element leaves the sources once, and ranks that want the same pass it on among themselves.

A relay is a sequence of hops, each planned as a move of pieces (`Pieced`). In the first hop, each element goes to one
of the ranks that want it: a box that several ranks want is cut into stripes, one for each of them (`striped`). In the
last hop, each rank gets what it lacks from these ranks. Between several hosts a hop in between brings each element
to one rank of each host, and the last hop stays within the hosts. Start at `Relay.of`. Standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...distributed.tensor._planner.boxes import Box
from .boxes import stripes, without
from .piece_moves import Listed, Pieced, WithinHosts, clipped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .piece_moves import End

STRIPE = 64 << 10  # the least bytes of a stripe: a shorter message costs more than its bytes


def stripe_count(size: int, rank_count: int) -> int:
    """Return into how many stripes a box is cut: one for each rank that wants it, but none shorter than STRIPE."""
    return min(max(size // STRIPE, 1), rank_count)


def striped(
    whole: Box, wanted: End, ranks: Iterable[int], before: End, itemsize: int, turn: int, is_in_place: bool
) -> Listed:
    """Choose which of the ranks that want a box get which stripes of it in a hop.

    Args:
        whole: the box of the tensor.
        wanted: which of these ranks wants which boxes in the end.
        before: which rank has which boxes before the hop. With `is_in_place`, a rank keeps what it wants and has
            already, passes that on, and nobody sends stripes of it.
        itemsize: the bytes of an element.
        turn: which of the ranks that want a box gets the first stripe of it, by its place among them.
    """
    shares: dict[int, list[tuple[int, Box]]] = {rank: [] for rank in ranks}
    for box, holders in wanted.cells(whole):
        left = [box]
        for rank, number in holders if is_in_place else ():
            for _, held in before.held(rank):
                shares[rank] += [(number, common) for part in left if (common := part.meet(held)).elements]
                left = without(left, held)
        for part in left:
            count = stripe_count(part.elements * itemsize, len(holders))
            for place, stripe in enumerate(stripes(part, count), turn):
                rank, number = holders[place % len(holders)]
                shares[rank].append((number, stripe))
    # What several ranks have in place, only the first of them passes on. The others needn't be sent it.
    for rank, own in shares.items() if is_in_place else ():
        for number, box in wanted.held(rank):
            kept = [common for _, held in before.held(rank) if (common := box.meet(held)).elements]
            for of_number, share in [*own]:
                kept = without(kept, share) if of_number == number else kept
            own += [(number, box) for box in kept]
    return Listed(shares.items())


class Relay(NamedTuple):
    """How one tensor is passed on.

    Attributes:
        first: which rank has which stripes after the first hop. It is the target of that hop.
        hops: the plans of the other hops, in order.
    """

    first: Listed
    hops: tuple[Pieced | WithinHosts, ...]

    @staticmethod
    def of(
        shape: tuple[int, ...],
        ends: tuple[End, End],
        ranks: Iterable[int],
        itemsize: int,
        turn: int,
        hosts: Mapping[int, str],
        memory: End | None = None,
    ) -> Relay:
        """Plan the hops of one tensor, whose target is on these ranks, and lies in the memory of these pieces."""
        (source, target), ranks, whole = ends, [*ranks], Box((0,) * len(shape), shape)
        lies_in = memory or target, memory or target
        is_in_place = any(True for rank in ranks for _ in source.held(rank))
        first = striped(whole, target, ranks, source, itemsize, turn, is_in_place)
        if not hosts:
            return Relay(first, (Pieced(shape, first, target, memory=lies_in),))
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(hosts[rank], []).append(rank)
        on_host: list[tuple[int, Iterable[tuple[int, Box]]]] = []
        within_host: dict[int, Pieced] = {}
        for of_host in by_host.values():
            wanted = clipped(target, of_host)
            # After the first hop, a rank of this host may have a stripe of what the host wants. It isn't sent again.
            stripes_on_host = striped(whole, wanted, of_host, first, itemsize, turn, True)
            on_host += [(rank, stripes_on_host.held(rank)) for rank in of_host]
            within_host |= dict.fromkeys(of_host, Pieced(shape, stripes_on_host, wanted, memory=lies_in))
        across = Pieced(shape, first, Listed(on_host), memory=lies_in)
        return Relay(first, (across, WithinHosts(within_host, lies_in)))


class RelayTurns:
    """Whose turn it is to get the first stripe of a tensor.

    A small tensor has fewer stripes than ranks want it. Without turns, the first rank would get all of these, and send
    them to all others. Every rank counts the same turns.
    """

    def __init__(self) -> None:
        self._loads: dict[int, list[int]] = {}  # for each count of ranks that want a tensor, the bytes that each got

    def next(self, end: End, itemsize: int) -> int | None:
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
