"""The process groups of a `Transfer`: who meets to make it, the group that carries its tensors, and its watch.

Start at `TransferGroup`. Ranks are those of the world, or those of a `Place` where several worlds met.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch.distributed as dist

from ..distributed._mesh.text import of_ranks
from .connections import Connections
from .meeting import in_world
from .place import Place
from .team import Common, Team, is_made_by_all, new_group
from .watch import CLOSED, CONNECT, ENDED, OVER, Watch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch.distributed import ProcessGroup

    from .meeting import Meeting


def is_fake(place: Place | None) -> bool:
    """True if the world's backend sends nothing, as torch's fake and threaded ones: no rank ever waits for another."""
    return place is None and dist.get_backend() in ("fake", "threaded")


def meeting_of(group: ProcessGroup | Sequence[int] | Place | None, gone: frozenset[int]) -> Meeting:
    """Return the next meeting of the ranks that make a Transfer, without those that are gone. All of them have to call
    this in one order, since meetings are counted."""
    if isinstance(group, Place):
        return group.meeting("A Transfer", [rank for rank in group.ranks if rank not in gone])
    if gone and group is None:
        group = [rank for rank in range(dist.get_world_size()) if rank not in gone]
    meeting = in_world(group, "A Transfer")
    # A meeting that still has them would wait for them until its timeout.
    if not gone.isdisjoint(meeting.ranks):
        both = of_ranks(sorted(gone.intersection(meeting.ranks)))
        raise ValueError(
            f"{both.capitalize()} left (gone=), and group has them. Give the list of those that are there."
        )
    return meeting


def common_of(place: Place | None) -> Common:
    """Return what all transfers of the place, or of the world, share on this rank."""
    return Common.of_world() if place is None else place.common


def new_control_group(place: Place | None, ranks: Sequence[int], name: str, meeting: Meeting) -> ProcessGroup | None:
    """Make a gloo group over these ranks, for their control messages. Collective over them."""
    if place is not None:
        return place.new_group(ranks, "cpu", name)
    return new_group(ranks, meeting.ranks, max(meeting.timeout, CONNECT), "gloo")


class TransferGroup:
    """The ranks of both sides of a Transfer, with the group that carries their tensors. Call `start_watch`, then
    `make`.

    Args:
        place: where the ranks met; None if they are those of the world.
        ranks: of both sides, ascending.
        device: where this rank's tensors are.
        device_type: of the tensors, the same on all ranks.

    Attributes:
        watch: ends waits that take too long; None before `start_watch`, where nobody waits, and after `end_watch` or
            `close`.
    """

    def __init__(self, place: Place | None, ranks: Sequence[int], device: torch.device, device_type: str) -> None:
        self.ranks = ranks
        self._team: Team | None = None  # before `make`, on a rank outside, and after `close`
        self.watch: Watch | None = None
        self._place, self._device, self._device_type = place, device, device_type

    @property
    def team(self) -> Team:
        """This rank's end of the group, on a rank that takes part."""
        if self._team is None:
            raise AssertionError("a rank that takes part is in the group")
        return self._team

    def start_watch(self, meeting: Meeting) -> None:
        """Watch this rank's waits from now on. Sets `watch`, unless there is one rank, or the backend is one that never
        waits."""
        # A transfer on one rank waits for nobody, and has no watch.
        if len(self.ranks) > 1 and not is_fake(self._place):
            common = common_of(self._place)
            self.watch = Watch(
                self.ranks,
                meeting.rank,
                dist.PrefixStore(f"{meeting.name}/watch", common.store),
                meeting.timeout,
                meeting.keeper,
                self._close_connections,
                self._carried,
                lambda: common.count_failure(self.ranks),
                keeps_store=meeting.rank == (0 if meeting.keeper is None else meeting.keeper),
                ends_surely=self._place is not None and self._place.fleet is not None,
            )

    def make(self, meeting: Meeting) -> None:
        """Make the group, and set `team`. Collective over `ranks`; over the whole world where its backend needs all
        ranks to make a group.

        If the group isn't gloo's and the watch was started before, a control group is made beside it; none is where all
        ranks of the world must make each group.
        """
        connections = Connections()
        with connections.opening(len(self.ranks) - 1):
            if self._place is not None:
                team = self._place.team(self.ranks, self._device_type)
            else:
                group = new_group(self.ranks, meeting.ranks, max(meeting.timeout, CONNECT))
                team = None if group is None else Team.of(group, self._device)
        if team is not None and team.group is not None:
            team.connections = connections
            # gloo carries control messages in the group itself. Where all ranks of the world have to make each group, a
            # second one is left out, and the tensors' group carries these messages, too.
            if team.control is None and self.watch is not None and not is_made_by_all():
                common, name = common_of(self._place), f"{team.name}/words"
                store = dist.PrefixStore(f"{meeting.name}/watch", common.store)
                control = common.control_group(
                    self.ranks, store, lambda: new_control_group(self._place, self.ranks, name, meeting)
                )
                team.use_control_group(*control)
            team.extend_timeout(meeting.timeout)
            team.gives_up = None if self.watch is None else self.watch.gives_up
        self._team = team

    def enter(self, text: str, waits: bool) -> None:
        """Tell the watch that the next step of this rank begins. Does nothing without a watch."""
        if self.watch is not None:
            self.watch.enter(text, waits)

    def end_run(self) -> None:
        """Tell the watch that no run is under way on this rank."""
        if self.watch is not None:
            self.watch.end()

    @contextlib.contextmanager
    def telling_interrupts(self) -> Iterator[None]:
        """Tell the other ranks at once if Ctrl-C, or `sys.exit()` in a signal's handler, ends the block. This rank may
        live on, and they would wait for it until the timeout."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                self.tell_interrupt(error)
            raise

    def tell_interrupt(self, error: BaseException) -> None:
        """Tell the other ranks that this one was interrupted in its run, or before its run began."""
        watch = self.watch
        if watch is None or watch.said is not None:
            return
        # Where it comes before its run, the others wait for this rank in the run that it was about to begin.
        if watch.position.step == OVER and not watch.begin("beginning the run"):
            return
        why = " ".join([type(error).__name__, *map(str, error.args)])
        watch.settle(RuntimeError(f"it was interrupted ({why})"), is_own=True)

    def _close_connections(self) -> None:
        """End all waits of this rank in the group. Called by the watch."""
        if self._team is not None:
            self._team.close_connections()

    def _carried(self) -> int:
        """The bytes that the group's connections carried. Called by the watch."""
        return 0 if self._team is None else self._team.connections.carried

    def end_watch(self, why: str = CLOSED) -> None:
        """Close the watch, if there is one, and set `watch` to None. The other ranks can still read how far this rank
        came, and why it left, CLOSED or ENDED. Takes up to two seconds if the store doesn't answer, and raises nothing
        then."""
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.close(why)

    def close(self, is_end: bool = False) -> None:
        """Watch no more, and destroy the group. With `is_end` other ranks hear that the program ended. A second call
        does nothing."""
        self.end_watch(ENDED if is_end else CLOSED)
        if self._team is not None:
            self._team.destroy()
        self._team = None
