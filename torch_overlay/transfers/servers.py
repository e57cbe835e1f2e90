"""A `Transfer` at an open place: it is made anew when servers come or go, and a run is finished with those that are
left. Start at `Servers.remake`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ..errors import TransferFailed
from ..rendezvous.meeting import Missing
from ..rendezvous.watch import OVER
from .bound_tensors import locals_of
from .changes import ChangesOnly
from .comparison import by_sentence, raise_if_any
from .run import memory_of_targets
from .ways import EitherWay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ..rendezvous.fleet import Fleet
    from ..rendezvous.place import Place
    from .changes import Kept
    from .run import TransferState, Unfit
    from .tensor_moves import TensorMove

RETRIES = 2  # of what failed, though all ranks are there


class Servers:
    """The servers of one Transfer, on one rank.

    Args:
        place: an open one, or one that this rank joined.
        make: makes the Transfer among the ranks that are there. Collective over them.
    """

    def __init__(self, place: Place, fleet: Fleet, make: Callable[[], TransferState]) -> None:
        self._place, self.fleet, self._make = place, fleet, make
        self._broken = 0  # so many failures in turn of which no server was the cause

    def remake(self, old: TransferState | None, lost: Mapping[int, str], takes_in: bool = True) -> TransferState:
        """Make the Transfer anew, without units that were lost, and with those at the door if `takes_in`. Collective
        over the ranks that are left. Lets go of `old`."""
        self.fleet.knock()
        kept: Kept = {}
        before = self.fleet.units
        if old is not None and old.group is not None:
            old.group.close()
            old.buffers.forget()
            if (exchanges := _with_changes(old)) is not None:
                kept = exchanges.give(_labels(old))
        while True:
            self.fleet.begin_epoch(lost, takes_in)
            self._place.forget_epochs()
            try:
                state = self._make()
            except (Missing, TransferFailed) as error:
                lost = self.lost(error)
                continue
            except ValueError as error:
                # If it isn't this unit's own, all ranks raise it: the budget of a newcomer, say, is too small.
                stay = {*before} & {*self.fleet.units}
                lost = {unit.number: str(error) for unit in self.fleet.units if unit not in stay}
                if not self.is_trainer and not any(self._place.rank in unit.ranks for unit in stay):
                    self.fleet.leave()
                elif lost:
                    continue
                raise
            if old is not None:
                _take_over(state, old, kept)
                state.version, state.stats, state.has_snapshot = old.version, old.stats, old.has_snapshot
            return state

    @property
    def is_trainer(self) -> bool:
        """True on a rank that met, False on one that joined."""
        return self._place.rank < self.fleet.trainers

    def lost(self, error: Missing | TransferFailed | Unfit) -> Mapping[int, str]:
        """Return the units that a failure has cost, for `remake`; only rank 0 has to know them. Raises the error if it
        is a trainer's, or this unit's own."""
        gone = (*error.gone, *getattr(error, "failed", ()))
        if any(rank < self.fleet.trainers for rank in gone):  # as all ranks see
            raise error
        if any(self._place.rank in unit.ranks for unit in self.fleet.units_of(gone)):
            self.fleet.leave()
            raise error
        if self._place.rank:
            return {}
        lost = self.fleet.lost_with(gone, str(error))
        # Where all ranks answer, a connection broke between two that live.
        self._broken = 0 if lost else self._broken + 1
        if self._broken > RETRIES or (not lost and not isinstance(error, TransferFailed)):
            self.fleet.fail(str(error))
            raise error
        return lost

    def is_left_out(self, state: TransferState) -> bool:
        """True on a trainer if the run that failed has ended on another one, which may wait for this rank in the
        program: this rank leaves this version out, and servers get the next one, in the run in which they are."""
        watch = None if state.group is None else state.group.watch
        is_over = watch is not None and self.is_trainer and watch.has_reached(OVER, range(self.fleet.trainers))
        if is_over and watch is not None:
            watch.skip()
        return is_over

    def has_news(self, problems: Sequence[str] = ()) -> bool:
        """True if servers came or left, where there is none and trainers don't come together in a run. Raises the
        problems of all trainers. Collective over them."""
        said = self._place.meeting("A run of trainers without a server").say([self.fleet.is_news(), *problems])
        texts = by_sentence({rank: each[1:] for rank, each in said.items()})
        raise_if_any(texts, why="A Transfer without a server can't run, and nothing was sent")
        return bool(said[0][0])


def _take_over(new: TransferState, old: TransferState, kept: Kept) -> None:
    """With `changes`, let ranks go on with what was sent and came before, so that newcomers alone get all of it."""
    if (exchanges := _with_changes(new)) is None:
        return
    exchanges.take(kept, _labels(new))
    locals_, problems = locals_of(new.targets, new.agreement.own)
    new.wrote.update(memory_of_targets(new, new.agreement.own, locals_))
    wrote, now = _places(old), _places(new)
    new.needs_whole = old.needs_whole or bool(problems) or any(wrote.get(key) != where for key, where in now.items())


def _with_changes(state: TransferState) -> ChangesOnly | EitherWay | None:
    """Return the exchanges of a run of all tensors; None without `changes`, or where these are several."""
    exchanges = None if state.group is None else state.plans.by_names[None].exchanges
    return exchanges if isinstance(exchanges, (ChangesOnly, EitherWay)) else None


def _own_moves(state: TransferState, indices: Iterable[int]) -> list[tuple[TensorMove, int]]:
    rank = cast("Place", state.agreement.place).rank
    return [(state.agreement.moves[index], rank) for index in indices]


def _labels(state: TransferState) -> list[object]:
    """For each tensor of the plan of all: its name, how it travels, and the box that this rank has of it."""
    moves = _own_moves(state, state.agreement.own)
    return [(each.tensor.name, each.tensor.wire, each.move.held(rank)) for each, rank in moves]


def _places(state: TransferState) -> dict[Any, object]:
    """Where the last run left each target, by its name, number and box."""
    moves = _own_moves(state, state.wrote)
    keys = [(each.tensor.name, each.numbers[1], each.move.wanted(rank)) for each, rank in moves]
    return dict(zip(keys, state.wrote.values()))
