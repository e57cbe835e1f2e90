"""A `Transfer` at an open place: it is made anew when servers come or go, and a run is finished with those that are
left. Start at `Fleets.remake`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..distributed._mesh.text import of_ranks
from ..errors import TransferFailed
from ..rendezvous.meeting import Missing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..rendezvous.fleet import Fleet
    from ..rendezvous.meeting import Place
    from .run import TransferState

logger = logging.getLogger(__name__)


class Fleets:
    """The servers of one Transfer, on one rank.

    Args:
        place: an open one, or one that this rank joined.
        make: makes the Transfer among the ranks that are there. Collective over them.
    """

    def __init__(self, place: Place, fleet: Fleet, make: Callable[[], TransferState]) -> None:
        self._place, self.fleet, self._make = place, fleet, make

    def remake(self, old: TransferState | None, lost: Mapping[int, str]) -> TransferState:
        """Make the Transfer anew, with those at the door and without units that were lost. Collective over the ranks
        that are left. Lets go of `old`."""
        if old is not None and old.group is not None:
            old.group.close()
            old.buffers.forget()
        while True:
            self.fleet.change(lost)
            try:
                state = self._make()
            except (Missing, TransferFailed) as error:
                lost = self.lost(error)
                continue
            for unit in self.fleet.joined:
                logger.info("the server %r joined, as %s", unit.name, of_ranks(unit.ranks))
            for name, ranks, why in self.fleet.gone:
                logger.warning("the server %r, %s, is gone: %s", name, of_ranks(ranks), why)
            return state

    @property
    def is_trainer(self) -> bool:
        """True on a rank that met, False on one that joined."""
        return self._place.rank < self.fleet.trainers

    def lost(self, error: Missing | TransferFailed) -> Mapping[int, str]:
        """Return the units that a failure has cost, for `remake`; only rank 0 has to know them. Raises the error if it
        is a trainer's."""
        gone = (*error.gone, *getattr(error, "failed", ()))
        if any(rank < self.fleet.trainers for rank in gone):  # as all ranks see
            raise error
        if self._place.rank in gone:
            self.fleet.leave()
            raise error
        if self._place.rank:
            return {}
        lost = self.fleet.lost_with(gone, str(error))
        if lost is None:
            self.fleet.fail(str(error))
            raise error
        return lost

    def has_news(self) -> bool:
        """True if servers came or left, where there is none and trainers don't come together in a run. Collective over
        the trainers."""
        said = self._place.meeting("A run of trainers without a server").say(self.fleet.is_news())
        return bool(said[0])
