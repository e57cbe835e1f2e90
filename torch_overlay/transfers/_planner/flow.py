"""Flows: who sends what to whom in a whole transfer, as one process finds it for all ranks. Standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .schedule import Schedule

if TYPE_CHECKING:
    from .schedule import AnyMove


class Flow(NamedTuple):
    """What ranks send to one another.

    Attributes:
        sent: bytes by sender and receiver.
        exchanges: how many there are.
        staged: the most bytes that a rank has in buffers.
    """

    sent: Counter[tuple[int, int]]
    exchanges: int
    staged: int

    @staticmethod
    def of(moves: Sequence[AnyMove], budget: int, gone: frozenset[int] = frozenset()) -> Flow:
        """Of all moves of a transfer: what its ranks would find, each its own part.

        Raises:
            ValueError: the budget is too small.
        """
        ranks = {rank for move in moves for rank in move.members}
        schedules = {rank: Schedule.of(moves, rank, gone) for rank in sorted(ranks - gone)}
        sent: Counter[tuple[int, int]] = Counter()
        for rank, schedule in schedules.items():
            sent.update({(rank, peer): stream.size for peer, stream in schedule.sends.items()})
        if not any(schedule.sent for schedule in schedules.values()):
            return Flow(sent, 0, 0)
        count = max([schedule.least(budget) for schedule in schedules.values()])
        return Flow(sent, count, max([each.buffered(count) for each in schedules.values()]))

    def __add__(self, other: Flow) -> Flow:  # type: ignore[override]
        """One after the other."""
        return Flow(self.sent + other.sent, self.exchanges + other.exchanges, max(self.staged, other.staged))

    def beside(self, other: Flow) -> Flow:
        """At the same time, on other ranks."""
        return Flow(self.sent + other.sent, max(self.exchanges, other.exchanges), max(self.staged, other.staged))


NOTHING = Flow(Counter(), 0, 0)
