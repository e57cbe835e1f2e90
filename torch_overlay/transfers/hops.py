"""The hops of a relay (`_planner/relay.py`): the tensors of this rank that each reads and writes, and their run."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ._planner.piece_moves import Listed, OnMesh, Pieced, PieceMove
from ._planner.relay import Relay, Turns
from ._planner.sides import Ranks, Side
from .changes import ChangesOnly
from .exchanges import Torn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ._planner.piece_moves import End
    from .blocks import Locals
    from .checkpoint import Rounds
    from .descriptions import Tensor
    from .exchanges import Exchanges
    from .sharding import Sharding
    from .watch import Watch


@lru_cache(maxsize=256)  # of shardings that all tensors of one kind share
def end_of(sharding: Sharding) -> Listed | OnMesh:
    """Which rank has which boxes of a tensor."""
    if sharding.pieces:
        return Listed(zip(sharding.ranks, sharding.pieces))
    return OnMesh(Side(sharding.regions, Ranks.of(sharding.ranks, sharding.regions.sizes)))


def relays_of(tensors: Sequence[Tensor], hosts: Mapping[int, str]) -> dict[str, Relay]:
    """By name, how tensors are passed on that several ranks want some of; the same on every rank.

    Args:
        hosts: where ranks say that they are. The others are taken for hosts of their own, if one says it.
    """
    turns, found = Turns(), {}
    for tensor in tensors:
        turn = turns.next(end_of(tensor.target), tensor.wire.itemsize)
        if turn is not None:
            places = tuple([(rank, hosts.get(rank, f"rank {rank}")) for rank in tensor.target.ranks]) if hosts else ()
            found[tensor.name] = _relay(tensor.source, tensor.target, tensor.wire.itemsize, turn, places)
    return found


# Equal tensors are planned once.
@lru_cache(maxsize=256)
def _relay(source: Sharding, target: Sharding, itemsize: int, turn: int, places: tuple[tuple[int, str], ...]) -> Relay:
    is_in_place = not set(source.ranks).isdisjoint(target.ranks)
    shape = tuple(source.regions.shape)
    return Relay.of(shape, (end_of(source), end_of(target)), itemsize, turn, is_in_place, dict(places))


class Hop(NamedTuple):
    """A hop after the first: the moves of all tensors in it.

    Attributes:
        moves: each from one piece of a tensor's target to another.
        sources, targets: for each move the numbers of the legs that have these pieces as targets.
    """

    moves: list[PieceMove]
    sources: list[int]
    targets: list[int]

    def part(self, numbers: Sequence[int]) -> Hop:
        """The part of it that belongs to some legs, with their places among these in place of their numbers."""
        place = {number: at for at, number in enumerate(numbers)}
        rows = [row for row in zip(*self) if row[1] in place]
        return Hop(
            [move for move, *_ in rows], [place[one] for _, one, _ in rows], [place[other] for *_, other in rows]
        )


def hops_of(legs: Iterable[tuple[Tensor, int]], relays: Mapping[str, Relay]) -> list[Hop]:
    """All hops after the first.

    Args:
        legs: of the first hop, each with the number of the target's piece.
    """
    numbers: dict[str, dict[int, int]] = {}
    tensors: dict[str, Tensor] = {}
    for number, (tensor, piece) in enumerate(legs):
        numbers.setdefault(tensor.name, {}).setdefault(piece, number)
        tensors[tensor.name] = tensor
    hops: list[Hop] = []
    for name, relay in relays.items():
        tensor, known = tensors[name], numbers[name]
        pairs = [pair for pair in _pairs(tensor.target) if known.keys() >= {*pair}]
        for level, pieces in enumerate(relay.hops):
            if level == len(hops):
                hops.append(Hop([], [], []))
            for one, other in pairs:
                hops[level].moves.append(PieceMove(pieces, (one, other), tensor.wire.itemsize, tensor.target.ranks))
                hops[level].sources.append(known[one])
                hops[level].targets.append(known[other])
    return hops


@lru_cache(maxsize=256)
def _pairs(target: Sharding) -> list[tuple[int, int]]:
    """The numbers of pieces of a target that meet."""
    if max(map(len, target.pieces), default=1) == 1:
        return [(0, 0)]
    end: End = end_of(target)
    meeting = Pieced(tuple(target.regions.shape), end, end)
    return sorted({*meeting.pairs(zip(target.ranks, target.pieces))})


class Relayed:
    """All hops of a plan, one after the other, with what a run asks of `Exchanges`.

    Args:
        first: the hop that reads the sources.
        hops: the others, which read targets; each with its exchanges.

    Attributes:
        reads, written: as of `Exchanges`, by place in the plan.
        sent_bytes, changed: as of `ChangesOnly`.
    """

    def __init__(self, first: Exchanges | Rounds, hops: Sequence[tuple[Hop, Exchanges]]) -> None:
        self._first, self._hops = first, hops
        self.reads, self.written = first.reads, frozenset[int]()
        for number, (_, exchanges) in enumerate(hops, 2):
            exchanges.label = f"hop {number} of {len(hops) + 1}, "

    @property
    def staging(self) -> int:
        """The most bytes that buffers take at one time."""
        return max([self._first.staging, *[exchanges.staging for _, exchanges in self._hops]])

    def run(
        self,
        sources: Locals,
        targets: Locals,
        sent: Callable[[], None] = lambda: None,
        keeps: bool = False,
        watch: Watch | None = None,
        state: object = None,
    ) -> None:
        """Run all hops. Raises as `Exchanges.run`; what an earlier hop wrote is torn, too."""
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
            finally:
                self.written |= {hop.targets[place] for place in exchanges.written}

    def forget(self) -> None:
        """Keep no view, and nothing of what was sent."""
        for each in self._all:
            each.forget()

    def lose(self, ranks: Iterable[int] | None = None) -> None:
        """See `ChangesOnly`."""
        some = None if ranks is None else [*ranks]
        for each in self._changes:
            each.lose(some)

    @property
    def sent_bytes(self) -> int:
        """See `ChangesOnly`."""
        return sum([each.sent_bytes for each in self._changes])

    @property
    def changed(self) -> tuple[int, int]:
        """See `ChangesOnly`."""
        each = [each.changed for each in self._changes]
        return sum([elements for elements, _ in each]), sum([of for _, of in each])

    @property
    def _all(self) -> list[Exchanges | Rounds]:
        return [self._first, *[exchanges for _, exchanges in self._hops]]

    @property
    def _changes(self) -> list[ChangesOnly]:
        return [each for each in self._all if isinstance(each, ChangesOnly)]
