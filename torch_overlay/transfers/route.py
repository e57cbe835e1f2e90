"""The torch side of a `Transfer`, from what its ranks say to the exchanges that it runs. Start at `Route`."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
from array import array
from datetime import timedelta
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from ..distributed._mesh.text import of_ranks
from ..distributed._torch import span
from ..show.words import counted
from ._planner.memory import NOTHING_SHARED, Shared
from ._planner.pieces import Pieced, PieceMove
from ._planner.routes import Move
from ._planner.schedule import ALIGNED, Flow, Schedule
from ._planner.sides import Ranks, Side
from .changes import ChangesOnly
from .checkpoint import Local, Round, Rounds
from .current import (
    Current,
    LastRun,
    Running,
    Word,
    copies,
    keep_for_this_stream,
    locals_of,
    names_of,
    size_of,
    whole_number,
)
from .descriptions import (
    SIDES,
    TORN,
    Description,
    Pieces,
    agreed,
    all_from_data,
    as_data,
    boxed,
    by_sentence,
    check_ranks,
    contents_of,
    describe,
    digest,
    own_tensors,
    shared_targets,
    stop,
    torn,
    unlike,
    untied,
    whole_layout,
)
from .exchanges import Buffers, Exchanges, Torn, Traffic, agreed_count
from .hops import Hop, Relayed, end_of, hops_of, relays_of
from .meeting import Place, in_world, living
from .planner_ranks import (
    LISTED,
    Verdict,
    agreed_beside,
    ask_planners,
    in_pieces,
    is_among,
    names_of_others,
    numbers_of,
    without_pieces,
)
from .team import Common, Team, is_made_by_all, new_group
from .watch import CONNECT, Watch, end_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from ..distributed.tensor._planner.regions import Box
    from ._planner.memory import Part
    from ._planner.relay import Relay
    from ._planner.schedule import AnyMove
    from .checkpoint import Contents
    from .current import Job
    from .descriptions import Described, Given, Layout, Names, Tensor
    from .exchanges import Locals
    from .meeting import Meeting
    from .planner_ranks import Answers, Others

    Plan = tuple[Sequence[int], Exchanges | Rounds | Relayed]  # the numbers of the legs that are moved, and how


class Leg(NamedTuple):
    """One way of a tensor.

    Attributes:
        numbers: of the pieces of its source and of its target that belong to it; 0 where it isn't in pieces.
        round: of a checkpoint, in which its source is read.
        local: of a checkpoint, what this rank reads for it.
    """

    tensor: Tensor
    numbers: tuple[int, int]
    move: AnyMove
    round: int = 0
    local: Local | None = None


def legs_of(tensors: Sequence[Tensor], gone: frozenset[int], relays: Mapping[str, Relay]) -> list[Leg]:
    """All legs, those of a tensor together; the same on every rank. Of tensors that are passed on, the first hop.

    Raises:
        ValueError: pieces of a source, or what is left of it without the ranks that are gone, don't cover it; names
            the tensors.
    """
    known: dict[Any, Ranks] = {}
    legs, problems = [], []
    for tensor in tensors:
        relay = relays.get(tensor.name)
        if relay is None and not (tensor.source.pieces or tensor.target.pieces):
            legs.append(Leg(tensor, (0, 0), _move(tensor, known)))
            continue
        pieces = _in_pieces(tensor.source, tensor.target, gone, relay)
        problems.append(torn(tensor, pieces))
        members = tensor.source.ranks + tensor.target.ranks
        for numbers in numbers_of(tensor, pieces):
            legs.append(Leg(tensor, numbers, PieceMove(pieces, numbers, tensor.wire.itemsize, members)))
    stop([problem for problem in problems if problem is not None], why=TORN)
    return legs


def legs_beside(
    legs: Sequence[Leg], answers: Answers, pieces: Sequence[Mapping[str, Layout]], beside: Others, rank: int
) -> list[Leg]:
    """The legs of a rank that asked planners, in the order of all legs, of which it knows a part.

    Args:
        legs: those of tensors that no rank has in pieces.
        pieces: by side, what this rank has in pieces.
    """
    ways = answers.moves(pieces, beside.layouts, rank)
    found = [*legs, *[Leg(tensor, numbers, move) for tensor, some in ways for numbers, move in some]]
    return sorted(found, key=lambda leg: (leg.tensor.name, leg.numbers))


def legs_of_checkpoint(
    tensors: Sequence[Tensor], contents: Contents, room: int, rank: int, hosts: Mapping[int, str] | None
) -> tuple[list[Leg], dict[str, Relay]]:
    """All legs where a checkpoint is the source, those of a round together, the same on every rank but for `local`;
    and how tensors are passed on.

    Args:
        room: the bytes that a rank reads in a round.
        hosts: where ranks say that they are; None if nothing is passed on.
    """
    shares = contents.shares([tensor.name for tensor in tensors], room)
    relays = {} if hosts is None else relays_of(_as_read(tensors, contents, contents.read_boxes(shares)), hosts)
    by_entry: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        by_entry.setdefault(contents.numbers[tensor.name], []).append(tensor)
    legs = []
    for number in range(max(map(len, shares))):
        parts = {
            (part.entry, reader): part
            for reader, share in zip(contents.ranks, shares)
            for part in (share[number] if number < len(share) else ())
        }
        readers: dict[int, list[int]] = {}
        for entry, reader in sorted(parts):
            readers.setdefault(entry, []).append(reader)
        for entry, ranks in readers.items():
            boxes = {reader: contents.boxes(parts[entry, reader]) for reader in ranks}
            own = boxes.get(rank, [])
            begins = [0, *itertools.accumulate([box.elements for box in own])]
            for tensor in by_entry[entry]:
                source = tensor.source._replace(
                    ranks=tuple(ranks), pieces=tuple([tuple(boxes[reader]) for reader in ranks])
                )
                pieces = _in_pieces(source, tensor.target, frozenset(), relays.get(tensor.name))
                members = source.ranks + tensor.target.ranks
                for piece, target in numbers_of(tensor._replace(source=source), pieces):
                    move = PieceMove(pieces, (piece, target), tensor.wire.itemsize, members)
                    local = None
                    if piece < len(own):
                        local = Local(parts[entry, rank], begins[piece], own[piece].length)
                    legs.append(Leg(tensor, (piece, target), move, number, local))
    return legs, relays


def _as_read(
    tensors: Iterable[Tensor], contents: Contents, boxes: Mapping[int, Mapping[int, Sequence[Box]]]
) -> list[Tensor]:
    """The tensors of a checkpoint, with the boxes that each reader reads in any round as their sources."""
    found = []
    for tensor in tensors:
        by_reader = boxes.get(contents.numbers[tensor.name], {})
        pieces = tuple([tuple(some) for some in by_reader.values()])
        found.append(tensor._replace(source=tensor.source._replace(ranks=tuple(by_reader), pieces=pieces)))
    return found


# Equal tensors are planned once.
@lru_cache(maxsize=256)
def _in_pieces(source: Layout, target: Layout, gone: frozenset[int], relay: Relay | None) -> Pieced:
    return Pieced(tuple(source.regions.shape), end_of(source), relay.first if relay else end_of(target), gone)


def _move(tensor: Tensor, known: dict[Any, Ranks]) -> Move:
    sides = []
    for layout in tensor.sides:
        key = layout.ranks, layout.regions.sizes
        if key not in known:
            known[key] = Ranks.of(*key)
        sides.append(Side(layout.regions, known[key]))
    return Move(sides[0], sides[1], tensor.wire.itemsize)


logger = logging.getLogger(__name__)
_open: WeakSet[Route] = WeakSet()


class Route:
    """See `Transfer`.

    Attributes:
        tensors: what is moved, in order of name. Where planners were asked, of those in pieces this rank's alone.
        many: how many are moved.
        ends: the ranks of the source, and those of the target.
        ranks: those of both sides.
        left_out: by side, the names that only this one has.
        version: what the sources said of the last run.
        traffic: by rank, bytes out and in, and the exchanges it needs; empty on a rank that is none of them.
        count: of exchanges.
        staging: the most bytes that a run has in buffers on this rank.
        process: the id of the one that made it.
    """

    def __init__(
        self,
        source: Any,
        target: Any,
        budget: int,
        group: ProcessGroup | Sequence[int] | Place | None,
        names: Names,
        gone: Sequence[int] = (),
        strict: bool = True,
        keep: bool = False,
        timeout: timedelta | None = None,
        changes: bool | str = False,
        relay: bool = False,
        host: str | None = None,
    ) -> None:
        self._place = place = group if isinstance(group, Place) else None
        left = frozenset(living(gone, "gone", None if place is None else place.size))
        meeting = _meeting(group, left)
        meeting.timeout = timeout or meeting.timeout
        most = None if relay else most_listed(place, len(meeting.ranks))  # what is passed on is planned by all pieces
        own = describe(source, target, names, place, most)
        description = own.description._replace(
            budget=budget,
            strict=strict,
            keep=keep,
            timeout=None if timeout is None else timeout.total_seconds(),
            changes=changes,
            relay=relay,
            host=host,
        )
        descriptions = all_from_data(meeting.say(as_data(description)))
        try:
            check_ranks(descriptions)
            self._contents, self._files = contents_of(descriptions), own.files
            is_listed = not any(each.unlisted for each in descriptions.values())
            if self._contents is not None and not is_listed:  # its readers plan by all pieces
                listed = as_data(description._replace(unlisted=0))
                descriptions, is_listed = all_from_data(_meeting(group, left).say(listed)), True
            if is_listed:
                self.tensors, self.left_out = agreed(descriptions, left, strict)
                self._count(self.tensors, None)
        except ValueError as error:
            raise error from own.error
        budget = min(each.budget for each in descriptions.values() if each.budget is not None)  # that all can keep
        self._tied = {names for each in descriptions.values() for names in each.tied}
        hosts = {rank: each.host for rank, each in descriptions.items() if each.host is not None}
        self._verdict: Verdict | None = None
        self._keys = array("q")
        relays: dict[str, Relay] = {}
        if not is_listed:
            self._ask_planners(meeting, lambda: _meeting(group, left), own, descriptions, left, strict)
        elif self._contents is None:
            relays = relays_of(self.tensors, hosts) if relay else {}
            self.legs = legs_of(self.tensors, left, relays)
        else:
            if changes:
                raise ValueError("changes= compares tensors of two runs, and the source is a checkpoint. Leave it out.")
            self.legs, relays = legs_of_checkpoint(
                self.tensors, self._contents, _room(budget), meeting.rank, hosts if relay else None
            )
        self._hops = hops_of([(leg.tensor, leg.numbers[1]) for leg in self.legs], relays)
        self.ranks = sorted({*self.ends[0], *self.ends[1]} - left)
        self._moves, self._budget, self._gone = [leg.move for leg in self.legs], budget, left
        self._plans: dict[tuple[str, ...] | None, Plan] = {}  # by the names that are moved alone; None is all
        self.version: int | None = None
        self._sources: list[Current | None] = []
        self._targets: list[Current | None] = []
        _check_nothing_is_lost(self.legs, left, self._verdict)
        self._team: Team | None = None
        self._running, self._is_closed = Lock(), False
        self._watch: Watch | None = None
        self._last: Running | None = None  # in the background
        self.process = os.getpid()
        self._seen: tuple[object, object, Shared] | None = None  # names, where they lay, and what they shared
        self.traffic: Traffic = {}
        self.count = self.staging = 0
        self._names, self._keeps, self._changes = names, keep, changes
        self._is_lost = False  # whether this rank asks for everything as a whole
        self._wrote: dict[int, object] = {}  # by number, where targets lay when the last run wrote them
        self.sent_bytes, self.changed = 0, (0, 0)
        self._last_runs: dict[tuple[str, ...] | None, LastRun] = {}  # as for plans
        if not self.many:
            return
        self._sources, self._targets = map(self._current, SIDES, own.sides)
        if self._tied:
            self._check_tied(_meeting(group, left))
        _open.add(self)
        self._make(meeting)

    def _ask_planners(
        self,
        meeting: Meeting,
        meet: Callable[[], Meeting],
        own: Described,
        descriptions: Mapping[int, Description],
        left: frozenset[int],
        strict: bool,
    ) -> None:
        """Where there are too many pieces to tell all ranks: each tensor in pieces is planned by one of them, and the
        others hear of their own part. Sets `tensors`, `left_out` and `legs`, of which a rank knows its own, and those
        of meshes.

        Args:
            meet: gives the next meeting of all.

        Raises:
            ValueError: something doesn't fit; names the tensors. The same on all ranks.
            RuntimeError: a rank left meanwhile; names it.
        """
        others = without_pieces(descriptions)
        members = [rank for rank, each in sorted(descriptions.items()) if each.source or each.target or each.unlisted]
        answers, said = None, dict[str, Any]()
        if meeting.rank in members:
            answers, said = self._ask_in_time(meeting, members, own, others, left, strict)
        again = meet()
        again.timeout = meeting.timeout
        every = again.say(said)
        stop(by_sentence({rank: [each["problem"]] for rank, each in sorted(every.items()) if each.get("problem")}))
        self._verdict = verdict = Verdict.of(every.values(), names_of_others(others))
        beside = agreed_beside(verdict, others, left, strict)
        self.legs, self.left_out, self.tensors = legs_of(beside.tensors, left, {}), beside.left_out, beside.tensors
        self._count(beside.tensors, verdict)
        if answers is None:
            return
        pieces = [in_pieces(layouts) for layouts in (own.description.source, own.description.target)]
        self.legs = legs_beside(self.legs, answers, pieces, beside, meeting.rank)
        self.tensors = [*{leg.tensor.name: leg.tensor for leg in self.legs}.values()]
        self._keys = answers.keys

    def _count(self, tensors: Sequence[Tensor], verdict: Verdict | None) -> None:
        """Set `many` and `ends`, of the tensors that each rank knows and of those that planners told of."""
        self.many = len(tensors) + (0 if verdict is None else verdict.tensors)
        self.ends = tuple([{rank for tensor in tensors for rank in getattr(tensor, side).ranks} for side in SIDES])
        firsts = [(tensor.name, tensor.source.device) for tensor in tensors[:1]]
        if verdict is not None:
            self.ends = tuple([own | more for own, more in zip(self.ends, verdict.ranks)])
            firsts += [] if verdict.first is None else [verdict.first]
        self._kind = min(firsts)[1] if firsts else "cpu"

    def _ask_in_time(
        self,
        meeting: Meeting,
        members: Sequence[int],
        own: Described,
        others: Mapping[int, Description],
        left: frozenset[int],
        strict: bool,
    ) -> tuple[Answers, dict[str, Any]]:
        """Ask planners, in the group of words of these ranks. Raises as `_ask_planners`."""

        def read(name: str, number: int) -> str:
            given = own.sides[0][name]
            if not isinstance(given, Pieces):
                raise AssertionError("a planner asks for digests of pieces")
            return digest(given.pieces[number]._local_tensor)

        team = Team(None, members, meeting.rank, torch.device("cpu"))
        if len(members) == 1:
            return ask_planners(team, own.description, others, left, strict, read, lambda text, waits: None)
        common, teams = self._common, [team]
        store = dist.PrefixStore(f"{meeting.name}/pieces", common.store)
        watch = Watch(
            members,
            meeting.rank,
            store,
            meeting.timeout,
            meeting.keeper,
            lambda: teams[-1].close_connections(),
            lambda: common.count_failure(members),
        )
        try:
            watch.enter("making the group of words", True)
            name = f"{meeting.name}/words"
            words, tag = common.words_of(members, store, lambda: self._new_words(members, name, meeting))
            team = Team(words, members, meeting.rank, torch.device("cpu"))
            teams.append(team)
            team.use_words(words, tag)
            team.wait_longer(meeting.timeout)
            found = ask_planners(team, own.description, others, left, strict, read, watch.enter)
        except Exception as error:
            said = watch.settle(error, is_own=not watch.position.waits)
            watch.close()
            raise RuntimeError(f"A Transfer over {of_ranks(members)} can't be made: {said}") from error
        watch.end()
        watch.close()
        return found

    def _check_tied(self, meeting: Meeting) -> None:
        """ValueError, on all ranks, if targets are one block of memory whose sources' values differ."""
        names = {name for names in self._tied for name in names}
        if self._contents is not None:
            self._check_tied_to_one()
            return
        sources, _ = locals_of(self._sources, range(len(self.legs)))
        digests = self._digests(sources, lambda current: current.name in names)
        problems = untied(sorted(self._tied), {rank: boxed(each) for rank, each in meeting.say(digests).items()})
        if problems:
            raise ValueError(f"A Transfer can't write to what its target is: {'; '.join(problems)}.")

    def _check_tied_to_one(self) -> None:
        """ValueError, on all ranks, if targets are one block of memory and the checkpoint has a tensor for each of
        them: whether they are equal isn't known before they are read."""
        if self._contents is None:
            raise AssertionError("only a checkpoint is asked for its tensors")
        moved = {tensor.name for tensor in self.tensors}
        for names in sorted(self._tied):
            given = [name for name in names if name in moved]
            entries = sorted({self._contents.numbers[name] for name in given})
            if len(entries) > 1:
                both = " and ".join([repr(self._contents.entries[number].name) for number in entries])
                raise ValueError(
                    f"The targets {', '.join(map(repr, given))} are one block of memory, as tied weights are, and the "
                    f"checkpoint has {both} for them: leave all but one out of the target, with strict=False."
                )

    def _make(self, meeting: Meeting) -> None:
        """The group and the plans, which ranks make together.

        Raises:
            RuntimeError: a rank left meanwhile; names it.
        """
        if meeting.rank not in self.ranks:
            self._new_team(meeting)  # where the whole world has to make the group
            return
        if len(self.ranks) > 1 and not _is_fake(self._place):
            common = self._common
            self._watch = Watch(
                self.ranks,
                meeting.rank,
                dist.PrefixStore(f"{meeting.name}/watch", common.store),
                meeting.timeout,
                meeting.keeper,
                self._close_connections,
                lambda: common.count_failure(self.ranks),
            )
        try:
            self._enter("making the process group", True)
            self._team = self._new_team(meeting)
            self._member.connect()
            self._enter("planning", True)
            self._buffers = Buffers(self._device)
            every = range(len(self.legs))
            (sources, wrong), (targets, more) = (locals_of(each, every) for each in (self._sources, self._targets))
            shared = NOTHING_SHARED if wrong or more else self._look(None, every, sources, targets)
            self._plans[None] = self._planned(every, sources, shared)
        except RuntimeError as error:
            if self._watch is None:
                raise
            said = self._watch.settle(error, is_own=False)
            self._end_watch()
            raise RuntimeError(f"A Transfer over {of_ranks(self.ranks)} can't be made: {said}") from error
        except Exception:  # as all ranks raise it
            self._end_watch()
            raise
        if self._watch is not None:
            self._watch.end()
        self.staging = self._plans[None][1].staging

    def _new_team(self, meeting: Meeting) -> Team | None:
        place = self._place
        if place is not None:
            team = place.team(self.ranks, self._kind)
        else:
            group = new_group(self.ranks, meeting.ranks, max(meeting.timeout, CONNECT))
            team = None if group is None else Team.of(group, self._device)
        if team is None or team.group is None:
            return team
        if team.words is None and self._watch is not None and not is_made_by_all():
            own = dist.PrefixStore(f"{meeting.name}/watch", self._common.store)
            name = f"{team.name}/words"
            team.use_words(*self._common.words_of(self.ranks, own, lambda: self._new_words(self.ranks, name, meeting)))
        team.wait_longer(meeting.timeout)
        return team

    def _new_words(self, ranks: Sequence[int], name: str, meeting: Meeting) -> ProcessGroup | None:
        if self._place is not None:
            return self._place.new_group(ranks, "cpu", name)
        return new_group(ranks, meeting.ranks, max(meeting.timeout, CONNECT), "gloo")

    @property
    def _common(self) -> Common:
        return Common.of_world() if self._place is None else self._place.common

    def _enter(self, text: str, waits: bool) -> None:
        if self._watch is not None:
            self._watch.enter(text, waits)

    def _close_connections(self) -> None:
        if self._team is not None:
            self._team.close_connections()

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _current(self, side: str, given: Mapping[str, Given]) -> list[Current | None]:
        found: list[Current | None] = []
        for tensor, numbers, *_ in self.legs:
            own = given.get(tensor.name)
            if isinstance(own, Pieces):
                number = numbers[SIDES.index(side)]
                own = own.pieces[number] if number < len(own.pieces) else None
            mesh = None if own is None else own.device_mesh
            if own is None or (mesh is not None and mesh.get_coordinate() is None):
                found.append(None)  # of a mesh that it isn't in, a rank has nothing
            else:
                found.append(Current(side, tensor.name, own, getattr(tensor, side), self._place))
        return found

    def bind(self, source: Any, target: Any) -> None:
        """Take other tensors for those of the trees that are given. Raises as `Transfer.bind`."""
        with self._running:
            if self._is_closed:
                raise RuntimeError("This Transfer is closed, and its process group with it. Make another one.")
            if not self.traffic:
                return
            before = self._sources, self._targets
            found = [
                old if tree is None else self._bound(side, own_tensors(tree, side, names), old)
                for side, tree, names, old in zip(SIDES, (source, target), (self._names, None), before)
            ]
            shared = self._shared(range(len(self.legs)), *([c and c.local for c in side] for side in found), *found)
            problems = self._problems(shared)
            if problems:
                raise ValueError(f"The target to bind can't be written: {'; '.join(problems)}. Nothing was bound.")
            self._sources, self._targets = found
            self._last_runs = {}

    def _bound(self, side: str, given: Mapping[str, Given], before: Sequence[Current | None]) -> list[Current | None]:
        found = self._current(side, given)
        for (tensor, *_), old, new in zip(self.legs, before, found):
            problem = None
            if old is not None and new is None:
                problem = f"lacks {tensor.name!r}, which this Transfer moves"
            elif old is None and new is not None:
                problem = f"has {tensor.name!r}, of which this rank had no part when this Transfer was made"
            elif old is not None and new is not None:
                problem = old.unlike(new)
            if problem is not None:
                raise ValueError(f"The {side} to bind {problem}. Nothing was bound.")
        return found

    @property
    def _for_buffers(self) -> int:
        """The bytes of the budget that buffers of exchanges take."""
        return self._budget - (0 if self._contents is None else _room(self._budget))

    def flow(self) -> Flow:
        """Who sends what to whom, of all ranks.

        Raises:
            ValueError: no rank knows it, since each heard of its own part from those who planned it.
        """
        if self._verdict is not None:
            raise ValueError(
                f"No rank knows what all ranks of a Transfer of more than {LISTED} pieces send to one another. Its "
                "traffic says what each of them sends and gets in all."
            )
        found = Flow.of(self._moves, self._budget, self._gone)
        for hop in self._hops:
            found += Flow.of(hop.moves, self._budget)
        return found

    def _planned(self, numbers: Sequence[int], sources: Locals, shared: Shared) -> Plan:
        """The exchanges of these tensors. Ranks agree on how many there are.

        What a run copies before, since it would overwrite it, leaves less of the budget for buffers.
        """
        if self._contents is not None:
            first, traffic = self._planned_rounds(numbers, self._contents)
            return self._with_hops(numbers, first, traffic, self._for_buffers)
        schedule = Schedule.of([self._moves[number] for number in numbers], self._member.rank, self._gone)
        read = {numbers[place] for place in schedule.reads}
        copied = size_of(sources, shared.overwritten.keys() & read)
        room = self._budget - copied
        try:
            return self._with_hops(numbers, *self._exchanges(schedule, self._wires(numbers), room), room)
        except ValueError as error:
            if not copied:
                raise
            raise ValueError(
                f"Targets of this rank lie in the memory of its sources, so that a run copies {copied} bytes before it "
                f"writes; {room} of the budget of {self._budget} bytes are left for buffers. {error}"
            ) from error

    def _with_hops(self, numbers: Sequence[int], first: Exchanges | Rounds, traffic: Traffic, room: int) -> Plan:
        """A plan: its first hop, and the others, if there are any, each with so many bytes for buffers."""
        hops, count = [], first.count
        for every in self._hops:
            hop = every.part(numbers)
            schedule = Schedule.of(hop.moves, self._member.rank)
            exchanges, more = self._exchanges(schedule, self._wires_of(hop, numbers), room)
            hops.append((hop, exchanges))
            count += exchanges.count
            traffic = _sum([traffic, more])
        if None not in self._plans:  # else of a part: the whole is what is told of
            self.count, self.traffic = count, traffic
        return numbers, Relayed(first, hops) if hops else first

    def _exchanges(self, schedule: Schedule, wires: list[torch.dtype | None], room: int) -> tuple[Exchanges, Traffic]:
        """The exchanges of a schedule, with so many bytes for buffers, and what each rank sends and gets."""
        team = self._member
        # Messages of changes are made beside what they are made of.
        count, traffic = agreed_count(schedule, room * 2 // 3 if self._changes else room, team)
        if self._changes:
            on_cpu = self._changes == "cpu"
            return ChangesOnly(schedule, count, team, wires, self._buffers, is_on_cpu=on_cpu), traffic
        return Exchanges(schedule, count, team, wires, self._buffers), traffic

    def _wires_of(self, hop: Hop, numbers: Sequence[int]) -> list[torch.dtype | None]:
        """From a target to a target, values travel in the narrower type that they had in the first hop."""
        tensors = [self.legs[numbers[place]].tensor for place in hop.targets]
        return [tensor.wire if tensor.wire != getattr(torch, tensor.target.dtype) else None for tensor in tensors]

    def _wires(self, numbers: Iterable[int]) -> list[torch.dtype | None]:
        tensors = [self.legs[number].tensor for number in numbers]
        return [tensor.wire if tensor.is_cast else None for tensor in tensors]

    def _planned_rounds(self, numbers: Sequence[int], contents: Contents) -> tuple[Rounds, Traffic]:
        """The rounds of these tensors, each with exchanges of its own within what reading leaves of the budget; and
        what each rank sends and gets in all of them."""
        by_round: dict[int, list[int]] = {}
        for place, number in enumerate(numbers):
            by_round.setdefault(self.legs[number].round, []).append(place)
        rest, rounds, traffics = self._for_buffers, list[Round](), list[Traffic]()
        for _, places in sorted(by_round.items()):
            some = [numbers[place] for place in places]
            schedule = Schedule.of([self._moves[number] for number in some], self._member.rank, self._gone)
            try:
                exchanges, traffic = self._exchanges(schedule, self._wires(some), rest)
            except ValueError as error:
                raise ValueError(
                    f"Of the budget of {self._budget} bytes a checkpoint is read into one half, and {rest} are left "
                    f"for buffers. {error}"
                ) from error
            locals_ = {n: local for n, number in enumerate(some) if (local := self.legs[number].local) is not None}
            rounds.append(Round(places, locals_, exchanges))
            traffics.append(traffic)
        empty: Traffic = dict.fromkeys(self._member.ranks, (0, 0, 0))
        return Rounds(rounds, contents, self._files, self._device), _sum([empty, *traffics])

    def run(
        self, only: Iterable[str] | None, version: int | None, check: bool, async_op: bool, snapshot: bool
    ) -> Running | None:
        """Read the sources and write the targets. Raises as `Transfer.run`."""
        self._take_turn()
        begun = None
        try:
            job = self._begin(only, version, check, async_op, snapshot)
            if async_op:
                device = self._device if self.traffic else torch.device("cpu")
                begun = self._last = Running(job, self._running.release, device, is_sent=snapshot)
                return begun
            job(lambda: None)
        finally:
            if begun is None:
                self._running.release()
        return None

    def refuse(self, why: str) -> None:
        """Say in place of a run that this rank can't take part. See `Transfer.refuse`."""
        self._take_turn()
        try:
            if self.traffic:
                self._run(Word([why or "it refused"]), (), [], [], lambda: None, NOTHING_SHARED, False)
        except ValueError:
            pass  # as all ranks have it
        finally:
            self._running.release()

    def _take_turn(self) -> None:
        """RuntimeError if it runs in another thread, or is closed; else nobody else runs it until `_running` is
        released."""
        if not self._running.acquire(blocking=False):
            raise RuntimeError("This Transfer is running, and runs go one at a time. Wait for that one to end.")
        if self._is_closed:
            self._running.release()
            raise RuntimeError("This Transfer is closed, and its process group with it. Make another one.")

    def _begin(
        self, only: Iterable[str] | None, version: int | None, check: bool, async_op: bool, snapshot: bool
    ) -> Job:
        """Look at the tensors of this moment; returns what is to be done with them. What is wrong goes into the word,
        so that all ranks hear of it."""
        if not self.traffic:
            return lambda sent: None
        last, self._last = self._last, None
        if last is not None:
            last.precede()
        names, problems = names_of(only)
        version, odd = whole_number(version)
        numbers, unknown = self._numbers(names)
        problems += [*odd, *unknown, *(last.unheard() if last is not None else [])]
        state = self._last_runs.pop(names, None)
        if state is not None and not problems and state.is_unchanged():
            sources, targets, shared = state.sources, state.targets, state.shared
        else:
            state = None  # it keeps what tensors gave up
            (sources, wrong), (targets, more) = (locals_of(each, numbers) for each in (self._sources, self._targets))
            problems += [*wrong, *more]
            shared = NOTHING_SHARED if problems else self._look(names, numbers, sources, targets)
            problems += self._problems(shared)
            if self._keeps and self._contents is None and not problems:
                currents = [side[number] for side in (self._sources, self._targets) for number in numbers]
                state = LastRun(currents, sources, targets, shared)
        problems += [] if self._files is None else self._files.changes()
        if state is not None:
            self._last_runs[names] = state
        plan = self._plans.get(names)
        staging = 0 if plan is None else plan[1].staging  # the first run of a part plans it beside the copies
        if snapshot:
            sources, full = copies(sources, self._budget - self.staging, range(len(sources)), "a snapshot")
            problems += full
        elif shared.overwritten:
            copied = shared.overwritten.keys() & (
                numbers if plan is None else {numbers[place] for place in plan[1].reads}
            )
            why = "copying this rank's sources that its targets overwrite"
            sources, full = copies(sources, self._budget - staging, copied, why)
            problems += full
        has_copies = snapshot or bool(shared.overwritten)
        if self._keeps:
            self._buffers.keep(self.staging if has_copies else self._for_buffers)
        watched = numbers if async_op and not snapshot else ()
        read = [(each, each.versions) for each in map(self._sources.__getitem__, watched) if each is not None]
        lie = self._lie(numbers, targets)
        lost = self._is_lost or any(self._wrote.get(number, where) != where for number, where in lie.items())
        word = Word(problems, names, version, check, async_op, lost)

        def job(sent: Callable[[], None]) -> None:
            changed: list[str] = []

            def are_read() -> None:
                if async_op and self._device.type != "cpu":  # nobody sees a change beside what is only launched
                    torch.accelerator.current_stream(self._device).synchronize()
                changed.extend([each.changed for each, before in read if each.versions != before])
                sent()

            if async_op:
                keep_for_this_stream((*sources, *targets))
            with span(f"Transfer of {counted(len(numbers), 'tensor')}"):
                is_background = self._run(word, numbers, sources, targets, are_read, shared, has_copies, state)
            if is_background:
                self._check_unchanged(changed)

        return job

    def _check_unchanged(self, problems: Sequence[str]) -> None:
        """ValueError, on all ranks, if a source of some rank was changed while it was read."""
        try:
            self._enter("comparing the sources' versions after the run", True)
            found = Word(problems).agree(self._member).problems
        except Exception as error:
            raise self._failed(error) from error
        self._end_run()
        if found:
            raise ValueError(
                f"A Transfer over {of_ranks(self.ranks)} ran, and what came is of two moments: {'; '.join(found)}. "
                "Wait until sent(), or run with snapshot=True."
            )

    @torch.inference_mode()  # in which all tensors can be written, those of inference mode, too; nothing made is kept
    def _run(
        self,
        word: Word,
        numbers: Sequence[int],
        sources: Locals,
        targets: Locals,
        sent: Callable[[], None],
        shared: Shared,
        has_copies: bool,
        state: LastRun | None = None,
    ) -> bool:
        """Whether some rank runs in the background. Calls `sent` when no source is read any more."""
        problems: list[str] = []
        if self._watch is not None:
            self._watch.begin("the word before the run", waits=True)
        try:
            problems, said, is_background, lost = word.agree(self._member)
            self._enter("planning", True)
            if word.checks and not problems:
                problems = self._unlike(sources)
            if not problems and word.only not in self._plans:
                try:
                    self._plans[word.only] = self._planned(numbers, sources, shared)
                except ValueError as error:  # on all ranks
                    problems = [str(error).removesuffix(".")]
            if not problems:
                places, exchanges = plan = self._plans[word.only]
                try:
                    # Views of copies would keep the copies.
                    keeps = self._keeps and not has_copies
                    own = [sources[n] for n in places], [targets[n] for n in places]
                    if isinstance(exchanges, (ChangesOnly, Relayed)) and self._changes:
                        self._lose(word, exchanges, lost)
                    exchanges.run(*own, sent, keeps, self._watch, state)
                    if isinstance(exchanges, (ChangesOnly, Relayed)) and self._changes:
                        self._note_sent(exchanges)
                except Torn:
                    self._count_writes(plan, state)
                    raise
                self._count_writes(plan, state)
                self._wrote |= self._lie(numbers, targets)
                self.version = said
        except Exception as error:
            raise self._failed(error) from error
        if problems:
            self._end_run()
            text = "; ".join(problems).removesuffix(".")
            hint = " It runs with the shapes, types and placements that it was made for, the same tensors on all ranks."
            raise ValueError(
                f"A Transfer over {of_ranks(self.ranks)} can't run, and nothing was sent: {text}."
                f"{hint if 'when the Transfer was made' in text else ''}"
            )
        if not is_background:
            self._end_run()
        return is_background

    def _lie(self, numbers: Sequence[int], targets: Locals) -> dict[int, object]:
        """Where targets lie, and how often they were written, by number: if that isn't as the last run left it, this
        rank may have lost what that run brought. Of no use without `changes`."""
        if not self._changes:
            return {}
        found: dict[int, object] = {}
        for number in numbers:
            current, local = self._targets[number], targets[number]
            if current is not None and local is not None:
                # While there is a weak reference to a storage, no other one gets its id.
                storage = StorageWeakRef(local.untyped_storage())
                found[number] = storage, local.data_ptr(), local.shape, local.stride(), current.versions
        return found

    def _lose(self, word: Word, exchanges: ChangesOnly | Relayed, lost: frozenset[int]) -> None:
        """Send whole what a rank may not have: one that says so, all where they ask for a check, and tensors that
        another plan moved since."""
        moved = None if word.only is None else {*word.only}
        for only, (_, other) in self._plans.items():
            if isinstance(other, (ChangesOnly, Relayed)):
                other.lose(self._member.ranks if word.checks else lost)
                if other is not exchanges and (moved is None or only is None or not moved.isdisjoint(only)):
                    other.lose()
        if self._is_lost and self._member.rank in lost:
            self._is_lost = False

    def _note_sent(self, exchanges: ChangesOnly | Relayed) -> None:
        self.sent_bytes, self.changed = exchanges.sent_bytes, exchanges.changed
        logger.debug(
            "A Transfer over %s: this rank sent %s bytes, %s of %s elements changed",
            *(of_ranks(self.ranks), self.sent_bytes, *self.changed),
        )

    def _end_run(self) -> None:
        if self._watch is not None:
            self._watch.end()

    def _count_writes(self, plan: Plan, state: LastRun | None) -> None:
        """Let autograd know which targets changed: backward of what was computed before raises then, as after copy_.

        After the sources' last look, since views of one storage share a counter: a background run that writes beside
        its sources would take them for changed by the program.
        """
        numbers, exchanges = plan

        def find() -> list[torch.Tensor]:
            targets = [self._targets[numbers[place]] for place in exchanges.written]
            return [each for target in targets if target is not None for each in target.counting]

        torch.autograd.graph.increment_version(find() if state is None else state.written(exchanges.written, find))

    def _failed(self, error: Exception) -> RuntimeError:
        """What to say of an error in a run: whether something was written, and who is missing."""
        state = (
            "some targets are new and others not, or half so" if isinstance(error, Torn) else "no target was written"
        )
        said = f"{str(error).removesuffix('.')}."
        if self._watch is not None:
            # While it waits, a rank's error is that of another one, whose connection broke.
            said = self._watch.settle(error, is_own=not self._watch.position.waits)
        return RuntimeError(f"A Transfer over {of_ranks(self.ranks)} failed, and {state}: {said}")

    def _unlike(self, sources: Locals) -> list[str]:
        """Which replicas that are no DTensors differ now, the same on all ranks."""
        tied = {name for names in self._tied for name in names}
        own = self._digests(sources, lambda current: current.box is not None or current.name in tied)
        layouts = {tensor.name: tensor.source for tensor in self.tensors}
        # Others may not know of a tensor what it is in pieces.
        all_say = self._member.gather_data([own, [name for name in own if layouts[name].pieces]])
        said = {rank: boxed(each) for rank, (each, _) in sorted(all_say.items())}
        layouts |= {name: _SOME_PIECES for _, names in all_say.values() for name in names}
        moved = {name for digests in said.values() for name in digests}  # as all ranks see it
        groups = [names for names in sorted(self._tied) if moved.issuperset(names)]
        differ = unlike([(Description(layouts, {}, None, digests), [rank]) for rank, digests in said.items()])
        return [problem.text for problem in differ] + untied(groups, said)

    def _digests(self, sources: Locals, is_asked: Callable[[Current], bool]) -> dict[str, list[tuple[Box, str]]]:
        """By name, each box of the sources of this rank that are asked for, with the digest of its values."""
        own: dict[str, list[tuple[Box, str]]] = {}
        seen = set()
        for current, local, leg in zip(self._sources, sources, self.legs):
            piece = leg.tensor.name, leg.numbers[0]
            if current is not None and local is not None and piece not in seen and is_asked(current):
                part = current.part(local)
                if part is not None:
                    own.setdefault(leg.tensor.name, []).append((part.box, digest(local)))
                seen.add(piece)
        return own

    def _look(self, names: tuple[str, ...] | None, numbers: Sequence[int], sources: Locals, targets: Locals) -> Shared:
        """Which of these tensors share memory on this rank; looked at again if one of them lies elsewhere."""
        sides = self._sources, self._targets
        lies = [current and current.lies for side in sides for current in map(side.__getitem__, numbers)]
        if self._seen is None or self._seen[:2] != (names, lies):
            self._seen = names, lies, self._shared(numbers, sources, targets, *sides)
        return self._seen[2]

    def _shared(
        self,
        numbers: Sequence[int],
        sources: Locals,
        targets: Locals,
        own_sources: Sequence[Current | None],
        own_targets: Sequence[Current | None],
    ) -> Shared:
        found: list[dict[int, Part]] = []
        for side, locals_ in ((own_sources, sources), (own_targets, targets)):
            parts: dict[int, Part] = {}
            for number in numbers:
                current, local = side[number], locals_[number]
                if current is not None and local is not None and (part := current.part(local)) is not None:
                    parts[number] = part
            found.append(parts)
        return Shared.of(*found)

    def _problems(self, shared: Shared) -> list[str]:
        """Why targets that share memory can't be written, in words."""
        return shared_targets(shared) + [
            f"the targets {', '.join(map(repr, names))} became one block of memory since this Transfer was made"
            for names in shared.tied
            if names not in self._tied
        ]

    def _numbers(self, only: tuple[str, ...] | None) -> tuple[Sequence[int], list[str]]:
        """The tensors that are meant, and what is wrong with their names."""
        if only is None:
            return range(len(self.legs)), []
        places: dict[str, list[int]] = {}
        for number, leg in enumerate(self.legs):
            places.setdefault(leg.tensor.name, []).append(number)
        unknown = [
            f"only names {name!r}, which this Transfer doesn't move"
            for name in only
            if name not in places and not is_among(self._keys, name)
        ]
        return [number for name in only for number in places.get(name, ())], unknown

    @property
    def _member(self) -> Team:
        if self._team is None:
            raise AssertionError("a rank that takes part is in the group")
        return self._team

    @property
    def _device(self) -> torch.device:
        """For what ranks tell one another, and for buffers: where this rank's tensors are, of the type that all say."""
        kind = self._kind
        own = [current.device for current in (*self._sources, *self._targets) if current is not None]
        return next((device for device in own if device.type == kind), torch.device(kind))

    def forget(self) -> None:
        """Let go of buffers and views that `keep` keeps, and of what `changes` keeps; ask for everything as a whole."""
        with self._running:
            if self.traffic and not self._is_closed:
                self._buffers.forget()
                self._last_runs = {}
                for _, exchanges in self._plans.values():
                    exchanges.forget()
                self._is_lost = bool(self._changes)

    def close(self) -> None:
        """Destroy the process group, and keep no tensor; again does nothing. Waits for a run in another thread."""
        with self._running:
            self._close()

    def end(self) -> None:
        """Close it at the end of the program, and log an error that nobody has heard of. A run that still goes on, in
        a thread that the interpreter doesn't wait for, is left alone."""
        if self._is_closed or not self._running.acquire(blocking=False):
            return
        try:
            for problem in self._last.unheard() if self._last is not None else ():
                logger.error("A Transfer over %s: %s", of_ranks(self.ranks), problem)
            if self._device.type == "cpu":
                self._close()
        except Exception:
            logger.debug("A Transfer over %s wasn't closed at the end", of_ranks(self.ranks), exc_info=True)
        finally:
            self._running.release()

    def _close(self) -> None:
        self._end_watch()
        if self._team is not None:
            self._team.destroy()
        if self.traffic:
            self._buffers.forget()
        self._is_closed, self._team = True, None
        self._sources, self._targets, self._plans = [], [], {}
        self._last, self._last_runs = None, {}


@atexit.register
def _close_all() -> None:
    """At the end of the interpreter, which has waited for runs in the background: close what the program left open.

    A thread of gloo's still holds the tensors of its last collective. If it lets go of them while the interpreter is
    torn down, the process ends by SIGABRT; a group that is destroyed before has joined its threads. NCCL has none.
    """
    for route in [*_open]:
        if route.process == os.getpid():  # a forked child has no threads to join
            route.end()
    end_threads()


def _sum(traffics: Sequence[Traffic]) -> Traffic:
    """Of exchanges that run one after the other, over the same ranks."""
    return {rank: tuple(map(sum, zip(*[each[rank] for each in traffics]))) for rank in traffics[0]}  # type: ignore[misc]


# How a source lies of which another rank said that it is in pieces.
_SOME_PIECES = whole_layout("uint8", (), (), "cpu")._replace(pieces=((),))


def most_listed(place: Place | None, ranks: int) -> int | None:
    """How many pieces a rank describes to all of so many; None if all of its own, since ranks ask planners by gloo, in
    a group that they make by themselves."""
    if _is_fake(place) or not dist.is_gloo_available() or (place is None and is_made_by_all()):
        return None
    return LISTED // ranks


def _room(budget: int) -> int:
    """The bytes of a budget into which a checkpoint is read; buffers take the others."""
    return max(budget // 2, ALIGNED)


def _is_fake(place: Place | None) -> bool:
    """Whether the world's backend sends nothing, so that nobody is ever waited for."""
    return place is None and dist.get_backend() in ("fake", "threaded")


def _meeting(group: ProcessGroup | Sequence[int] | Place | None, left: frozenset[int]) -> Meeting:
    """Of all that make a Transfer, without those that left.

    Raises:
        ValueError: the group has some that left.
    """
    if isinstance(group, Place):
        return group.meeting("A Transfer", [rank for rank in range(group.size) if rank not in left])
    if left and group is None:
        group = [rank for rank in range(dist.get_world_size()) if rank not in left]
    meeting = in_world(group, "A Transfer")
    if not left.isdisjoint(meeting.ranks):
        both = of_ranks(sorted(left.intersection(meeting.ranks)))
        raise ValueError(
            f"{both.capitalize()} left (gone=), and group has them. Give the list of those that are there."
        )
    return meeting


def _check_nothing_is_lost(legs: Sequence[Leg], gone: frozenset[int], verdict: Verdict | None) -> None:
    """ValueError, on all ranks: names the tensors of which ranks that are gone had what nobody else has."""
    lost, wanted = (set[str](), set[str]()) if verdict is None else ({*verdict.lost}, {*verdict.wanted})
    for tensor, _, move, *_ in legs:
        if not gone.isdisjoint(tensor.source.ranks) and move.lost(gone):
            lost.add(tensor.name)
        if not gone.isdisjoint(tensor.target.ranks):
            wanted.add(tensor.name)
    who = of_ranks(sorted(gone)).capitalize()
    if wanted:
        names = ", ".join(map(repr, sorted(wanted)))
        raise ValueError(f"{who} left (gone=), and the targets {names} are there, too.")
    if lost:
        names = ", ".join(map(repr, sorted(lost)))
        raise ValueError(
            f"{who} left (gone=), and nobody else has some parts of {names}. "
            "Load these from a checkpoint, and leave them out here."
        )
