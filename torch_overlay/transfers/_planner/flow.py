"""Flows: who sends what to whom in a whole transfer, as one process finds it for all ranks. Standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .routes import Move
from .schedule import Schedule
from .sides import Side

if TYPE_CHECKING:
    from .reductions import Portion
    from .schedule import AnyMove


def moves_of(parts: Sequence[Portion], moves: Sequence[AnyMove]) -> list[AnyMove]:
    """The moves of one phase, when its reductions are done."""
    found = []
    for number, reduction, slab, _ in parts:
        move = moves[number]
        if reduction is not None and isinstance(move, Move):
            source = Side(reduction.after, move.source.ranks, slab)
            move = Move(source, move.target._replace(slab=slab), move.itemsize)
        found.append(move)
    return found


def held(parts: Sequence[Portion], moves: Sequence[AnyMove]) -> int:
    """The bytes of the results of reductions on a rank, at most."""
    return sum([part.results(moves[part.number].itemsize) for part in parts])


class Flow(NamedTuple):
    """What ranks send to one another.

    Attributes:
        sent: bytes by sender and receiver.
        exchanges: how many there are.
        staged: the most bytes that a rank has in buffers, with results of reductions.
        reductions: how many collectives bring pending values together before.
    """

    sent: Counter[tuple[int, int]]
    exchanges: int
    staged: int
    reductions: int

    @staticmethod
    def of(
        phases: Sequence[Sequence[Portion]],
        moves: Sequence[AnyMove],
        types: Sequence[object],
        budget: int,
        gone: frozenset[int] = frozenset(),
    ) -> Flow:
        """Of all phases of a transfer: what its ranks would find, each its own part.

        Args:
            types: of the elements of each tensor; what differs isn't reduced together.

        Raises:
            ValueError: the budget is too small.
        """
        sent: Counter[tuple[int, int]] = Counter()
        exchanges = staged = reductions = 0
        for parts in phases:
            these, results = moves_of(parts, moves), held(parts, moves)
            ranks = {rank for move in these for rank in move.members}
            schedules = {rank: Schedule.of(these, rank, gone) for rank in sorted(ranks - gone)}
            for rank, schedule in schedules.items():
                sent.update({(rank, peer): stream.size for peer, stream in schedule.sends.items()})
            if any(schedule.sent for schedule in schedules.values()):
                count = max([schedule.least(budget - results) for schedule in schedules.values()])
                exchanges += count
                staged = max([staged, *[results + each.buffered(count) for each in schedules.values()]])
            staged = max(staged, results + sum([part.packed for part in parts]))
            pending = {(part.reduction.steps, types[part.number]) for part in parts if part.reduction is not None}
            reductions += sum([len(steps) for steps, _ in pending])
        return Flow(sent, exchanges, staged, reductions)

    def __add__(self, other: Flow) -> Flow:  # type: ignore[override]
        """One after the other."""
        more = max(self.staged, other.staged), self.reductions + other.reductions
        return Flow(self.sent + other.sent, self.exchanges + other.exchanges, *more)

    def beside(self, other: Flow) -> Flow:
        """At the same time, on other ranks."""
        most = [max(pair) for pair in zip(self[1:], other[1:])]
        return Flow(self.sent + other.sent, *most)


NOTHING = Flow(Counter(), 0, 0, 0)
