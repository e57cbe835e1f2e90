"""What all ranks of a `Transfer` agree on when they make it: the tensors, and which rank sends what. Start at `agree`.

Each rank describes its tensors to all others in one meeting. If there are too many pieces for that, each tensor in
pieces is planned by one rank (`planner_ranks`), and the others hear of their own part.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ..distributed._mesh.text import of_ranks
from ..errors import TransferFailed
from ..rendezvous.group import common_of, meeting_of, most_listed, new_control_group
from ..rendezvous.long_waits import said_if_long
from ..rendezvous.meeting import Place, checked_ranks
from ..rendezvous.team import Team
from ..rendezvous.watch import Watch
from .checkpoint import bytes_to_read_into
from .comparison import agreed, by_sentence, check_ranks, contents_of, raise_if_any
from .descriptions import SIDES, Description, all_from_data, as_data, describe
from .hops import hops_of
from .hosts import own_host, passes_on
from .pieces import Pieces, digest
from .planner_ranks import (
    Verdict,
    agreed_beside,
    ask_planners,
    in_pieces,
    is_among,
    names_of_others,
    without_pieces,
)
from .relays import relays_of
from .tensor_moves import TensorMove, check_nothing_is_lost, moves_from_planners, moves_of, moves_of_checkpoint
from .trees import with_paths

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    from torch.distributed import ProcessGroup

    from ..rendezvous.meeting import Meeting
    from .checkpoint import Contents
    from .descriptions import Described, Tensor
    from .hops import PassedOn
    from .options import Options
    from .pieces import Given
    from .planner_ranks import Answers
    from .relays import Passing
    from .tensor_files import Files
    from .trees import Names

    Group: TypeAlias = ProcessGroup | Sequence[int] | Place | None
    Sides = tuple[Mapping[str, Given], Mapping[str, Given]]  # the source's tensors by name, and the target's


# With more pieces on several hosts, tensors are planned by their planners, and nothing is passed on unless relay=True.
# On 8 ranks a Transfer of 72,000 pieces was made in 5.4 to 6.1 s where all list them, and in 2.5 s by planners.
MOST_PASSED_ON = 1 << 17


@dataclass(frozen=True)
class Agreement:
    """What this rank knows after all ranks have agreed. The same on every rank, but for what the text calls its own.

    Attributes:
        place: where the ranks met; None if they are ranks of the world.
        gone: the ranks that have left.
        budget: the smallest one that a rank gave, in bytes.
        tensors: what is moved, in order of name. Where planners planned, of tensors in pieces this rank's own alone.
        moves: how they are moved; where planners planned, in the same way this rank's own.
        passed: the moves by which ranks pass elements on.
        why: why they do, or don't, in words; "" where nobody had to decide.
        hosts: on which one each rank of the meeting is.
        tensor_count: how many tensors are moved by any rank.
        ends: the ranks of the source, and those of the target, also those that are gone.
        ranks: those of both sides, without those that are gone, ascending.
        device_type: of the tensors.
        left_out: for "source" and "target", the names that only this side has.
        tied: the names of targets that are one block of memory on some rank.
        multi_mesh: the names of the sources that lie on several meshes.
        contents: the checkpoint that is the source; None if tensors are.
        files: the checkpoint's files, if this rank reads it: its own.
        paths: by name, the paths of sources that `names=` calls otherwise on this rank: its own.
        verdict: what planners said to all ranks; None if nobody asked planners.
        name_keys: the keys of the names that planners planned, ascending.
    """

    place: Place | None
    gone: frozenset[int]
    budget: int
    tensors: Sequence[Tensor]
    moves: list[TensorMove]
    passed: list[PassedOn]
    why: str
    hosts: Mapping[int, str]
    tensor_count: int
    ends: tuple[set[int], set[int]]
    ranks: list[int]
    device_type: str
    left_out: dict[str, tuple[str, ...]]
    tied: set[tuple[str, ...]]
    multi_mesh: frozenset[str]
    contents: Contents | None
    files: Files | None
    paths: Mapping[str, str]
    verdict: Verdict | None
    name_keys: array[int]

    def indices_of(self, names: tuple[str, ...] | None) -> tuple[Sequence[int], list[str]]:
        """Find the moves of these names; of all names, if None. Of tensors that planners planned, only those of this
        rank."""
        if names is None:
            return range(len(self.moves)), []
        unknown = [
            f"only names {name!r}, which this Transfer doesn't move"
            for name in names
            if name not in self._indices and not is_among(self.name_keys, name)
        ]
        return [index for name in names for index in self._indices.get(name, ())], unknown

    @cached_property
    def _indices(self) -> dict[str, list[int]]:
        """For each name, the indices of its moves in `moves`."""
        indices: dict[str, list[int]] = {}
        for index, move in enumerate(self.moves):
            indices.setdefault(move.tensor.name, []).append(index)
        return indices


def agree(
    source: Any, target: Any, group: Group, names: Names, gone_ranks: Sequence[int], options: Options
) -> tuple[Agreement, Meeting, Sides]:
    """Describe this rank's tensors to all ranks that make the Transfer, hear theirs, and list the moves. Collective."""
    place = group if isinstance(group, Place) else None
    gone = frozenset(checked_ranks(gone_ranks, "gone", None if place is None else place.size))
    meeting = meeting_of(group, gone)
    if options.timeout is not None:
        meeting.timeout = timedelta(seconds=options.timeout)
    # A relay is planned from the pieces of all ranks.
    most = None if options.relay else most_listed(place, len(meeting.ranks))
    with said_if_long("reading its tensors, or the headers of its checkpoint, for a Transfer"):
        own = describe(source, target, names, place, most)
    is_nothing = source is None and target is None
    # The host goes beside, so that ranks of a mesh over several hosts say the same.
    own = own._replace(
        description=own.description._replace(options=options._replace(host=None), gives_nothing=is_nothing)
    )
    descriptions = all_from_data(meeting.say(as_data(own.description), options.host or own_host()))
    hosts = meeting.owns
    tensors: Sequence[Tensor] = []
    left_out: dict[str, tuple[str, ...]] = {}
    try:
        check_ranks(descriptions)
        contents = contents_of(descriptions)
        is_listed = not any(description.unlisted for description in descriptions.values())
        piece_count = sum([description.unlisted for description in descriptions.values()])
        may_pass_on = options.relay is None and not options.changes and len({*hosts.values()}) > 1
        if not is_listed and (contents is not None or (may_pass_on and piece_count <= MOST_PASSED_ON)):
            # Readers cut the files by the pieces of all targets, and who passes on what is planned from the pieces of
            # all ranks. So those who kept theirs for the planners list them.
            listed = as_data(own.description._replace(unlisted=0))
            descriptions, is_listed = all_from_data(meeting_of(group, gone).say(listed)), True
        if is_listed:
            tensors, left_out = agreed(descriptions, gone, options.strict)
    except ValueError as error:
        # The traceback of reading this rank's own trees says more than the text that all ranks have.
        raise type(error)(with_paths(str(error), own.paths)) from own.error
    given = {rank: d.options for rank, d in descriptions.items() if d.options is not None}
    budget = min(each.budget for each in given.values())
    planned = _Planned(None, array("q"))
    relays: dict[str, list[Passing]] = {}
    why = ""

    def relays_for(tensors: Sequence[Tensor]) -> dict[str, list[Passing]]:
        """Plan how tensors are passed on, if they are."""
        nonlocal why
        is_passed, why = (bool(options.relay), "") if options.relay is not None else passes_on(tensors, hosts)
        return relays_of(tensors, hosts, has_rounds=contents is None) if is_passed else {}

    if not is_listed:
        tensors, left_out, moves, planned = _ask_planners(meeting, own, descriptions, group, options.strict, gone)
    elif contents is None:
        # With changes= much less is sent than adds up here, and each hop takes as long however little it sends.
        relays = {} if options.changes and options.relay is None else relays_for(tensors)
        moves = moves_of(tensors, gone, relays)
    else:
        if options.changes:
            raise ValueError("changes= compares tensors of two runs, and the source is a checkpoint. Leave it out.")
        room = bytes_to_read_into(budget)
        moves, relays = moves_of_checkpoint(tensors, contents, room, meeting.rank, relays_for)
    verdict = planned.verdict
    known = tensors if planned.on_meshes is None else planned.on_meshes
    ends = _ends(known, verdict)
    passed = hops_of(moves, relays)
    check_nothing_is_lost(moves, gone, verdict)
    agreement = Agreement(
        place=place,
        gone=gone,
        budget=budget,
        tensors=tensors,
        moves=moves,
        passed=passed,
        why=why,
        hosts=hosts,
        tensor_count=len(known) + (0 if verdict is None else verdict.tensors),
        ends=ends,
        ranks=sorted({*ends[0], *ends[1]} - gone),
        device_type=_device_type(known, verdict),
        left_out=left_out,
        tied={names for description in descriptions.values() for names in description.tied},
        multi_mesh=planned.multi_mesh.union([tensor.name for tensor in known if tensor.source.meshes > 1]),
        contents=contents,
        files=own.files,
        paths=own.paths,
        verdict=verdict,
        name_keys=planned.name_keys,
    )
    return agreement, meeting, own.sides


def _ends(tensors: Sequence[Tensor], verdict: Verdict | None) -> tuple[set[int], set[int]]:
    """Return the ranks of all sources and those of all targets."""
    sources, targets = ({rank for tensor in tensors for rank in getattr(tensor, side).ranks} for side in SIDES)
    if verdict is not None:
        sources, targets = sources | verdict.ranks[0], targets | verdict.ranks[1]
    return sources, targets


def _device_type(tensors: Sequence[Tensor], verdict: Verdict | None) -> str:
    """Return the device type of the first tensor by name, which all ranks know; "cpu" if there is no tensor."""
    firsts = [(tensor.name, tensor.source.device) for tensor in tensors[:1]]
    if verdict is not None and verdict.first is not None:
        firsts.append(verdict.first)
    return min(firsts)[1] if firsts else "cpu"


class _Planned(NamedTuple):
    """What all ranks know of tensors that planners planned.

    Attributes:
        on_meshes: the tensors that all ranks know, since no rank has them in pieces; None if nobody asked planners.
        multi_mesh: the names of the sources that lie on several meshes.
    """

    verdict: Verdict | None
    name_keys: array[int]
    on_meshes: Sequence[Tensor] | None = None
    multi_mesh: frozenset[str] = frozenset()


def _ask_planners(
    meeting: Meeting,
    own: Described,
    descriptions: Mapping[int, Description],
    group: Group,
    strict: bool,
    gone: frozenset[int],
) -> tuple[Sequence[Tensor], dict[str, tuple[str, ...]], list[TensorMove], _Planned]:
    """Agree where there are too many pieces to tell all ranks: ask planners, then hear the verdict. Collective."""
    others = without_pieces(descriptions)
    members = [rank for rank, d in sorted(descriptions.items()) if d.source or d.target or d.unlisted]
    answers, own_verdict = None, dict[str, Any]()
    if meeting.rank in members:
        answers, own_verdict = _ask_in_time(meeting, members, own, others, group, strict, gone)
    verdict_meeting = meeting_of(group, gone)
    verdict_meeting.timeout = meeting.timeout
    verdicts = verdict_meeting.say(own_verdict)
    raise_if_any(by_sentence({rank: [v["problem"]] for rank, v in sorted(verdicts.items()) if v.get("problem")}))
    verdict = Verdict.of(verdicts.values(), names_of_others(others))
    beside = agreed_beside(verdict, others, gone, strict)
    moves = moves_of(beside.tensors, gone, {})
    # Of a tensor whose target is in pieces, a rank knows the move only if it has a part.
    multi_mesh = frozenset([name for name, sharding in beside.shardings[0].items() if sharding.meshes > 1])
    # This rank has no tensors. It only hears what the planners say to all.
    if answers is None:
        return beside.tensors, beside.left_out, moves, _Planned(verdict, array("q"), beside.tensors, multi_mesh)
    pieces = [in_pieces(shardings) for shardings in (own.description.source, own.description.target)]
    moves = moves_from_planners(moves, answers, pieces, beside, meeting.rank)
    tensors = [*{move.tensor.name: move.tensor for move in moves}.values()]
    return tensors, beside.left_out, moves, _Planned(verdict, answers.keys, beside.tensors, multi_mesh)


def _ask_in_time(
    meeting: Meeting,
    members: Sequence[int],
    own: Described,
    others: Mapping[int, Description],
    group: Group,
    strict: bool,
    gone: frozenset[int],
) -> tuple[Answers, dict[str, Any]]:
    """Ask planners, and end the waits that take longer than the timeout. Collective over the members."""

    def read(name: str, number: int) -> str:
        """Return the digest of one of this rank's pieces of a source."""
        given = own.sides[0][name]
        if not isinstance(given, Pieces):
            raise AssertionError("a planner asks for digests of pieces")
        return digest(given.pieces[number]._local_tensor)

    team = Team(None, members, meeting.rank, torch.device("cpu"))
    if len(members) == 1:
        return ask_planners(team, own.description, others, gone, strict, read, lambda text, waits: None)
    place = group if isinstance(group, Place) else None
    # If the watch ends a wait while the control group is being made, it closes the connections of the latest team.
    common, teams = common_of(place), [team]
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
        watch.enter("making the control group", True)
        name = f"{meeting.name}/words"
        control, tag = common.control_group(members, store, lambda: new_control_group(place, members, name, meeting))
        team = Team(control, members, meeting.rank, torch.device("cpu"))
        teams.append(team)
        team.use_control_group(control, tag)
        team.extend_timeout(meeting.timeout)
        answered = ask_planners(team, own.description, others, gone, strict, read, watch.enter)
    except Exception as error:
        said = watch.settle(error, is_own=not watch.position.waits)
        watch.close()
        raise TransferFailed(f"A Transfer over {of_ranks(members)} can't be made: {said}", watch.gone) from error
    except BaseException as error:
        watch.settle(RuntimeError(f"it was interrupted ({type(error).__name__})"), is_own=True)
        watch.close()
        raise
    watch.end()
    watch.close()
    return answered


def refuse_transfer(place: Place, why: str) -> None:
    """Tell the other ranks of a place, which make a `Transfer`, that this rank can't. Collective over the place.

    All other ranks raise a ValueError with `why` at once. Otherwise they would wait for this rank until the timeout.
    """
    place.meeting("A Transfer").say(as_data(Description({}, {}, why)))
