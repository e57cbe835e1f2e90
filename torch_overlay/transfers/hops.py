"""The hops of a relay (`_planner/relay.py`): which tensors of this rank each hop reads and writes, and their run.

The first hop reads the sources. Each later one reads and writes targets. Start at `hops_of` and `Relayed.run`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ._planner.piece_moves import Listed, OnMesh, Pieced, PieceMove
from ._planner.relay import Relay, Turns
from ._planner.sides import Ranks, Side
from .exchanges import Torn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ..rendezvous.watch import Watch
    from ._planner.piece_moves import End
    from .blocks import Locals
    from .descriptions import Tensor
    from .exchanges import AnyExchanges, Exchanges
    from .sharding import Sharding


@lru_cache(maxsize=256)  # the experts of a layer share one sharding, and so one end, whose cells are cut once
def end_of(sharding: Sharding) -> Listed | OnMesh:
    """Return which rank has which boxes of a tensor with this sharding, in the form that the planner takes."""
    if sharding.pieces:
        return Listed(zip(sharding.ranks, sharding.pieces))
    return OnMesh(Side(sharding.regions, Ranks.of(sharding.ranks, sharding.regions.sizes)))


def relays_of(tensors: Sequence[Tensor], hosts: Mapping[int, str]) -> dict[str, Relay]:
    """Plan the relay of each tensor of which several ranks want the same elements; the same on every rank."""
    turns, relays = Turns(), {}
    for tensor in tensors:
        turn = turns.next(end_of(tensor.target), tensor.wire.itemsize)
        if turn is not None:
            places = tuple([(rank, hosts.get(rank, f"rank {rank}")) for rank in tensor.target.ranks]) if hosts else ()
            relays[tensor.name] = _relay(tensor.source, tensor.target, tensor.wire.itemsize, turn, places)
    return relays


# Cached by value: tensors with equal shardings and an equal turn are planned once.
@lru_cache(maxsize=256)
def _relay(source: Sharding, target: Sharding, itemsize: int, turn: int, places: tuple[tuple[int, str], ...]) -> Relay:
    """Plan the relay of tensors with these shardings."""
    is_in_place = not set(source.ranks).isdisjoint(target.ranks)
    shape = tuple(source.regions.shape)
    return Relay.of(shape, (end_of(source), end_of(target)), itemsize, turn, is_in_place, dict(places))


class Hop(NamedTuple):
    """A hop after the first one, with the moves of all tensors in it.

    Attributes:
        moves: each from pieces of a tensor's target to pieces of the same target.
        sources: for each of these moves, the index of a move of the first hop whose target is the piece that it reads.
        targets: in the same way, for the piece that it writes.
    """

    moves: list[PieceMove]
    sources: list[int]
    targets: list[int]

    def part(self, numbers: Sequence[int]) -> Hop:
        """Return the part of the hop that belongs to some moves of the first hop."""
        place = {number: at for at, number in enumerate(numbers)}
        rows = [row for row in zip(*self) if row[1] in place]
        return Hop(
            [move for move, _, _ in rows],
            [place[source] for _, source, _ in rows],
            [place[target] for _, _, target in rows],
        )


def hops_of(first_hop: Iterable[tuple[Tensor, int]], relays: Mapping[str, Relay]) -> list[Hop]:
    """List all hops after the first one."""
    numbers: dict[str, dict[int, int]] = {}
    tensors: dict[str, Tensor] = {}
    for number, (tensor, piece) in enumerate(first_hop):
        numbers.setdefault(tensor.name, {}).setdefault(piece, number)
        tensors[tensor.name] = tensor
    hops: list[Hop] = []
    for name, relay in relays.items():
        tensor, known = tensors[name], numbers[name]
        # Piece numbers that no move of the first hop has, for instance of empty pieces, need no later hop.
        pairs = [pair for pair in _pairs(tensor.target) if known.keys() >= {*pair}]
        # One more hop without hosts, two with them. Tensors without a relay have none.
        for level, pieces in enumerate(relay.hops):
            if level == len(hops):
                hops.append(Hop([], [], []))
            for numbers_pair in pairs:
                source, target = numbers_pair
                hops[level].moves.append(PieceMove(pieces, numbers_pair, tensor.wire.itemsize, tensor.target.ranks))
                hops[level].sources.append(known[source])
                hops[level].targets.append(known[target])
    return hops


@lru_cache(maxsize=256)
def _pairs(target: Sharding) -> list[tuple[int, int]]:
    """Return the pairs of piece numbers of a target between which elements may move: those of boxes that overlap."""
    if max(map(len, target.pieces), default=1) == 1:
        return [(0, 0)]
    end: End = end_of(target)
    meeting = Pieced(tuple(target.regions.shape), end, end)
    return sorted({*meeting.pairs(zip(target.ranks, target.pieces))})


class Relayed:
    """Runs all hops of a plan, one after the other. See `AnyExchanges`.

    Args:
        first: the exchanges of the hop that reads the sources.
        hops: the other hops, which read targets, each with its exchanges.
    """

    def __init__(self, first: AnyExchanges, hops: Sequence[tuple[Hop, Exchanges]]) -> None:
        self._first, self._hops = first, hops
        self._all = [first, *[exchanges for _, exchanges in hops]]
        self.reads, self.written = first.reads, frozenset[int]()
        # The first hop has no label: it is named as a transfer without a relay.
        for number, (_, exchanges) in enumerate(hops, 2):
            exchanges.label = f"hop {number} of {len(hops) + 1}, "

    @property
    def count(self) -> int:
        """How many exchanges there are in all hops."""
        return sum([exchanges.count for exchanges in self._all])

    @property
    def staging(self) -> int:
        """The most bytes that buffers take at one time in a run."""
        return max([exchanges.staging for exchanges in self._all])

    def run(
        self,
        sources: Locals,
        targets: Locals,
        sent: Callable[[], None] = lambda: None,
        keeps: bool = False,
        watch: Watch | None = None,
        state: object = None,
    ) -> None:
        """Run all hops. Collective. `sent` is called in the first one, the only one that reads sources."""
        self.written = frozenset()
        try:
            self._first.run(sources, targets, sent, keeps, watch, state)
        finally:
            self.written = self._first.written
        for hop, exchanges in self._hops:
            try:
                locals_ = [[targets[place] for place in places] for places in (hop.sources, hop.targets)]
                exchanges.run(locals_[0], locals_[1], lambda: None, keeps, watch, state)
            except Exception as error:
                if self.written and not isinstance(error, Torn):
                    raise Torn(str(error)) from error
                raise
            finally:  # also if it failed: the version counters of the targets that it wrote have to rise
                self.written |= {hop.targets[place] for place in exchanges.written}

    def forget(self) -> None:
        """Let go of all views, and of what was sent, in all hops."""
        for exchanges in self._all:
            exchanges.forget()

    def send_whole_next(self, ranks: Iterable[int] | None = None) -> None:
        """In the next run, send whole messages to these ranks, in all hops."""
        receivers = None if ranks is None else [*ranks]
        for exchanges in self._all:
            exchanges.send_whole_next(receivers)

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank sent in the last run, in all hops."""
        return sum([exchanges.sent_bytes for exchanges in self._all])

    @property
    def changed(self) -> tuple[int, int]:
        """How many elements this rank sent in the last run, and of how many, in all hops."""
        counts = [exchanges.changed for exchanges in self._all]
        return sum([elements for elements, _ in counts]), sum([total for _, total in counts])
