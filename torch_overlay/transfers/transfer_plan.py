"""The plans of a `Transfer` on one rank: which exchanges bring the tensors of a run. Start at `Plans.add`.

A plan of a checkpoint has rounds, and one with a relay has parts; each of these has exchanges of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from ._planner.schedule import ALIGNED, NOTHING, BudgetTooSmall, Flow, Schedule
from .bound_tensors import size_of
from .changes import ChangesOnly
from .checkpoint import BUFFERS, Round, Rounds, bytes_to_read_into
from .exchanges import AnyExchanges, Exchanges, Traffic, agreed_count
from .hops import Parts, RunPart, parts_of
from .hosts import Links, is_better
from .stages import turns_of
from .ways import EitherWay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..rendezvous.group import TransferGroup
    from ._planner.memory import Shared
    from .agreement import Agreement
    from .blocks import Buffers, Locals
    from .checkpoint import Contents
    from .stages import Stages, Turns
    from .tensor_moves import TensorMove


class Room(NamedTuple):
    """The part of the budget that buffers may take.

    Attributes:
        size: bytes.
        budget_of: returns the budget that would leave buffers so many bytes.
        why: what takes the rest of the budget, in words; "" if nothing does.
    """

    size: int
    budget_of: Callable[[int], int]
    why: str


class Plan(NamedTuple):
    """What a run moves, and how.

    Attributes:
        indices: of the moves.
        exchanges: run them.
        traffic: for each rank the bytes out, the bytes in, and the exchanges that it would need alone.
        turns: of this rank's stages.
    """

    indices: Sequence[int]
    exchanges: AnyExchanges
    traffic: Traffic
    turns: Turns

    def bytes_of(self, rank: int) -> int:
        """The bytes that a rank sends and gets."""
        out, into, _ = self.traffic[rank]
        return out + into


def bytes_for_buffers(agreement: Agreement) -> int:
    """Return the bytes of the budget that buffers of exchanges may take."""
    return agreement.budget - (0 if agreement.contents is None else BUFFERS * bytes_to_read_into(agreement.budget))


def budget_of_checkpoint(needed: int) -> int:
    """Return a budget that has at least so many bytes for buffers where a checkpoint is read."""
    return 2 * needed + 2 * BUFFERS * ALIGNED


def flow_of(agreement: Agreement) -> Flow:
    """Compute what all ranks send to one another in a run that brings everything."""
    flow = NOTHING
    is_checkpoint = agreement.contents is not None
    moves, passed = (agreement.moves, agreement.passed) if agreement.hops is None else agreement.hops
    for part in parts_of(moves, passed, range(len(moves)), is_checkpoint):
        flow += Flow.of(part.moves, agreement.budget, agreement.gone)
    return flow


class Plans:
    """The plans of one rank, by the names that are moved; None stands for all names.

    Args:
        agreement: of all ranks.
        group: of the Transfer, made already.
        buffers: allocates the buffers of all exchanges.
        changes: as `Transfer` takes it.
        stages: of this rank.

    Attributes:
        by_names: the plans made so far.
    """

    def __init__(
        self,
        agreement: Agreement,
        group: TransferGroup,
        buffers: Buffers,
        changes: bool | str,
        stages: Stages | None,
    ) -> None:
        self._agreement, self._group, self._buffers, self._changes = agreement, group, buffers, changes
        self._stages = stages
        self._moves = [each.move for each in agreement.moves]
        self.by_names: dict[tuple[str, ...] | None, Plan] = {}

    def add(
        self,
        names: tuple[str, ...] | None,
        indices: Sequence[int],
        sources: Locals,
        shared: Shared,
        is_snapshot: bool = False,
    ) -> None:
        """Plan a run that moves these names, and keep the plan in `by_names`. The first plan is that of all names.
        Collective over the team: ranks agree on how many exchanges there are."""
        self._group.enter("planning", False)
        contents, budget = self._agreement.contents, self._agreement.budget
        parts = parts_of(self._agreement.moves, self._agreement.passed, indices, contents is not None)
        rounds: list[tuple[AnyExchanges, Traffic]] = []
        # A checkpoint is read into buffers, which no target overlaps. So nothing is copied before.
        if contents is not None:
            left = bytes_for_buffers(self._agreement)
            why = f"Of the budget of {budget} bytes a checkpoint is read into one half, and {left} are left for buffers"
            room = Room(left, budget_of_checkpoint, f"{why}.")
            rounds.append(self._rounds(indices, contents, room))
        hops, busiest = self._hops([self._agreement.moves[index] for index in indices])
        rank, gone = self._group.team.rank, self._agreement.gone
        schedules = [Schedule.of(part.moves, rank, gone) for part in (*parts[len(rounds) :], *hops)]
        if contents is None:
            room = self._room(indices, parts + hops, schedules, sources, shared, is_snapshot)
        direct = rounds + [
            self._exchanges(schedule, self._wires(part, indices), room, self._changes)
            for part, schedule in zip(parts[len(rounds) :], schedules)
        ]
        turns = turns_of(self._stages, self._named(parts, indices), bool(self._changes))
        is_one = len(parts) == 1 and not self._agreement.levels
        exchanges = direct[0][0] if is_one else Parts(_pairs(parts, direct), turns)
        traffic = _sum([each for _, each in direct])
        if hops:  # beside one part of changes, which has no stages
            passed = [
                self._exchanges(schedule, self._wires(part, indices), room, False)
                for part, schedule in zip(hops, schedules[len(parts) :])
            ]
            relayed = Parts(_pairs(hops, passed), turns_of(None, self._named(hops, indices), True))
            exchanges = EitherWay(cast("ChangesOnly", exchanges), relayed, self._agreement.hosts, busiest)
            traffic = _sum([each for _, each in passed])
        self.by_names[names] = Plan(indices, exchanges, traffic, turns)

    def _named(self, parts: Sequence[RunPart], indices: Sequence[int]) -> list[list[tuple[int, str]]]:
        names = [self._agreement.moves[index].tensor.name for index in indices]
        return [[(place, names[place]) for place in part.targets] for part in parts]

    def _hops(self, straight: Sequence[TensorMove]) -> tuple[list[RunPart], int]:
        """The parts of a run in which what these moves bring is passed on, and the bytes of its busiest link. No parts
        if that is never better: with `only`, less may go over links than is worth a hop more."""
        hops, hosts = self._agreement.hops, self._agreement.hosts
        if hops is None:
            return [], 0
        direct, relayed = Links.of({move.tensor.name: move.tensor for move in straight}.values(), hosts)
        is_ever = is_better(relayed.busiest, direct.busiest)
        return hops.parts(straight) if is_ever else [], relayed.busiest

    def _room(
        self,
        indices: Sequence[int],
        parts: Sequence[RunPart],
        schedules: Sequence[Schedule],
        sources: Locals,
        shared: Shared,
        is_snapshot: bool,
    ) -> Room:
        """Return what copies of sources leave of the budget."""
        # Sources that targets overlap, but that nobody reads, needn't be copied.
        read = {
            indices[part.sources[number][1]]
            for part, schedule in zip(parts, schedules)
            for number in schedule.reads
            if not part.sources[number][0]
        }
        copied = size_of(sources, indices if is_snapshot else shared.overwritten.keys() & read)
        cause = "Targets of this rank lie in the memory of its sources, so that a run"
        if is_snapshot:
            cause = "A snapshot of this rank's sources"
        budget = self._agreement.budget
        left = budget - copied
        remain = (
            f"{left} of the budget of {budget} bytes are left for"
            if left > 0
            else f"the budget of {budget} bytes has no room for"
        )
        why = f"{cause} copies {copied} bytes before it writes; {remain} buffers."
        return Room(left, lambda needed: needed + copied, why if copied else "")

    def _exchanges(
        self, schedule: Schedule, wires: list[torch.dtype | None], room: Room, changes: bool | str
    ) -> tuple[Exchanges, Traffic]:
        """Make the exchanges of a schedule. Collective."""
        team = self._group.team
        # A message of changes is packed while the whole message, from which it is made, is still there.
        for_whole, why = room.size, [room.why]
        if changes:
            for_whole = room.size * 2 // 3
            why.append(f"With changes= whole messages get two thirds of {room.size} bytes.")
        self._group.enter("agreeing on the number of exchanges", True)
        try:
            count, traffic = agreed_count(
                schedule, for_whole, team, whole_budget=lambda n: room.budget_of(n + -(-n // 2) if changes else n)
            )
        except BudgetTooSmall as error:
            # Where nothing is left, what a part of that is too small for says nothing.
            said = [room.why] if room.size <= 0 else [*why, error.why]
            raise BudgetTooSmall(" ".join(filter(None, said)), error.needed) from error
        self._group.enter("planning", False)
        if changes:
            on_cpu = changes == "cpu"
            return ChangesOnly(schedule, count, team, wires, self._buffers, is_on_cpu=on_cpu), traffic
        return Exchanges(schedule, count, team, wires, self._buffers), traffic

    def _wires(self, part: RunPart, indices: Sequence[int]) -> list[torch.dtype | None]:
        """Return the dtype in which each tensor travels in a part of a run; None if that changes no dtype.

        From target to target it is that of the first hop, since a float32 target that was filled with bfloat16 values
        holds no more than these.
        """
        wires: list[torch.dtype | None] = []
        for (is_target, _), place in zip(part.sources, part.targets):
            tensor = self._agreement.moves[indices[place]].tensor
            is_cast = tensor.wire != getattr(torch, tensor.target.dtype) if is_target else tensor.is_cast
            wires.append(tensor.wire if is_cast else None)
        return wires

    def _rounds(self, indices: Sequence[int], contents: Contents, room: Room) -> tuple[Rounds, Traffic]:
        """Make the rounds of a checkpoint, each with exchanges of its own. Collective."""
        by_round: dict[int, list[int]] = {}
        for place, index in enumerate(indices):
            by_round.setdefault(self._agreement.moves[index].round, []).append(place)
        rounds, traffics = list[Round](), list[Traffic]()
        for _, places in sorted(by_round.items()):
            in_round = [indices[place] for place in places]
            schedule = Schedule.of(
                [self._moves[index] for index in in_round], self._group.team.rank, self._agreement.gone
            )
            moves = [self._agreement.moves[index] for index in in_round]
            wires = [move.tensor.wire if move.tensor.is_cast else None for move in moves]
            exchanges, traffic = self._exchanges(schedule, wires, room, False)
            locals_ = {place: move.local for place, move in enumerate(moves) if move.local is not None}
            rounds.append(Round(places, locals_, exchanges))
            traffics.append(traffic)
        nothing: Traffic = dict.fromkeys(self._group.team.ranks, (0, 0, 0))
        return Rounds(rounds, contents, self._agreement.files, self._buffers.device), _sum([nothing, *traffics])


def _pairs(
    parts: Sequence[RunPart], planned: Sequence[tuple[AnyExchanges, Traffic]]
) -> list[tuple[RunPart, AnyExchanges]]:
    return [(part, exchanges) for part, (exchanges, _) in zip(parts, planned)]


def _sum(traffics: Sequence[Traffic]) -> Traffic:
    """Add up the traffic of exchanges that run one after the other, over the same ranks."""
    return {rank: tuple(map(sum, zip(*[each[rank] for each in traffics]))) for rank in traffics[0]}  # type: ignore[misc]
