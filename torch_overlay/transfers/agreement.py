"""What all ranks of a `Transfer` agree on when they make it: the tensors, and which rank sends what. Start at `agree`.

Each rank describes its tensors to all others, and plans from what all said. Tensors that all ranks describe alike are
compared and planned once.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..distributed._mesh.text import of_ranks
from ..rendezvous.group import meeting_of
from ..rendezvous.long_waits import said_if_long
from ..rendezvous.meeting import checked_ranks
from ..rendezvous.place import Place
from .checkpoint import bytes_to_read_into
from .comparison import Sides, by_sentence, contents_of, raise_if_any
from .descriptions import SIDES, Description, all_from_data, as_data, boxed, describe
from .hops import Hops, hops_of
from .hosts import own_host, passes_on
from .pieces import digests_of
from .relays import passings_by_turn, relays_of
from .replicas import replica_problems
from .stages import levels_of, torn_groups
from .tensor_moves import TensorMove, check_nothing_is_lost, moves_of, moves_of_checkpoint, own_moves, tensors_as_read
from .trees import with_paths

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from torch.distributed import ProcessGroup

    from ..rendezvous.fleet import Fleet
    from ..rendezvous.meeting import Meeting
    from .checkpoint import Contents, Stretch
    from .descriptions import Tensor
    from .hops import PassedOn
    from .options import Options
    from .pieces import Given
    from .stages import Stages
    from .tensor_files import Files
    from .trees import Names

    Group: TypeAlias = ProcessGroup | Sequence[int] | Place | None
    Tensors = tuple[Mapping[str, Given], Mapping[str, Given]]  # the source's tensors by name, and the target's


@dataclass(frozen=True)
class Agreement:
    """What this rank knows after all ranks have agreed. The same on every rank, but for what the text calls its own.

    Attributes:
        place: where the ranks met; None if they are ranks of the world.
        gone: the ranks that have left.
        budget: the smallest one that a rank gave, in bytes.
        tensors: what is moved, in order of name.
        moves: how they are moved.
        own: the indices of the moves that this rank plans (`own_moves`). With rounds or stages, or where elements may
            be passed on, of all moves, since all ranks count the same parts of a run.
        passed: the moves by which ranks pass elements on.
        hops: with `changes`, those by which a run goes that brings so much that elements are better passed on; None if
            no run does.
        why: why they do, or don't, in words; "" where nobody had to decide.
        hosts: on which one each rank of the meeting is.
        ends: the ranks of the source, and those of the target, also those that are gone.
        ranks: those of both sides, without those that are gone, ascending.
        device_type: of the tensors.
        left_out: for "source" and "target", the names that only this side has.
        tied: the names of targets that are one block of memory on some rank.
        multi_mesh: the names of the sources that lie on several meshes.
        contents: the checkpoint that is the source; None if tensors are.
        files: the checkpoint's files, if this rank reads it: its own.
        paths: by name, the paths of sources that `names=` calls otherwise on this rank: its own.
        levels: the names that come in stages on some rank, and in which turn.
    """

    place: Place | None
    gone: frozenset[int]
    budget: int
    tensors: Sequence[Tensor]
    moves: list[TensorMove]
    own: Sequence[int]
    passed: list[PassedOn]
    hops: Hops | None
    why: str
    hosts: Mapping[int, str]
    ends: tuple[set[int], set[int]]
    ranks: list[int]
    device_type: str
    left_out: dict[str, tuple[str, ...]]
    tied: set[tuple[str, ...]]
    multi_mesh: frozenset[str]
    contents: Contents | None
    files: Files | None
    paths: Mapping[str, str]
    levels: Mapping[str, int]

    def indices_of(self, names: tuple[str, ...] | None) -> tuple[Sequence[int], list[str]]:
        """Find this rank's moves of these names; of all names, if None. Also returns what is wrong with the names."""
        if names is None:
            return self.own, []
        unknown = [f"only names {n!r}, which this Transfer doesn't move" for n in names if n not in self._names]
        return [index for name in names for index in self._indices.get(name, ())], unknown

    @cached_property
    def _names(self) -> set[str]:
        return {tensor.name for tensor in self.tensors}

    @cached_property
    def _indices(self) -> dict[str, list[int]]:
        """For each name, the indices of this rank's moves."""
        indices: dict[str, list[int]] = {}
        for index in self.own:
            indices.setdefault(self.moves[index].tensor.name, []).append(index)
        return indices


def agree(
    source: Any,
    target: Any,
    group: Group,
    names: Names,
    gone_ranks: Sequence[int],
    options: Options,
    stages: Stages | None = None,
) -> tuple[Agreement, Meeting, Tensors]:
    """Describe this rank's tensors to all ranks that make the Transfer, hear theirs, and list the moves. Collective."""
    place = group if isinstance(group, Place) else None
    fleet = None if place is None else place.fleet
    if fleet is not None and gone_ranks:
        raise ValueError("At an open place servers that are gone are left out; gone= is for others.")
    gone = frozenset(checked_ranks(gone_ranks, "gone", None if place is None else place.size))
    meeting = meeting_of(group, gone)
    if options.timeout is not None:
        meeting.timeout = timedelta(seconds=options.timeout)
    with said_if_long("reading its tensors, or the headers of its checkpoint, for a Transfer"):
        own = describe(source, target, names, place, stages)
    is_nothing = source is None and target is None
    # The host goes beside, so that ranks of a mesh over several hosts say the same.
    own = own._replace(
        description=own.description._replace(options=options._replace(host=None), gives_nothing=is_nothing)
    )
    descriptions = all_from_data(meeting.say(as_data(own.description), options.host or own_host()))
    try:
        if place is not None and fleet is not None:
            descriptions = _admitted(
                place, fleet, descriptions, lambda some: _compared(Sides.of(some, gone), some, options.strict)
            )
        sides = Sides.of(descriptions, gone)
        if sides.replicated:
            _compare_replicas(meeting_of(group, gone), meeting.timeout, own.sides[0], sides)
        # Where no server is there, nothing is moved.
        is_alone = fleet is not None and not fleet.units
        contents, tensors, left_out = _compared(sides, descriptions, options.strict) if not is_alone else (None, [], {})
    except ValueError as error:
        # The traceback of reading this rank's own trees says more than the text that all ranks have.
        raise type(error)(with_paths(str(error), own.paths)) from own.error
    budget = min(d.options.budget for d in descriptions.values() if d.options is not None)
    levels = _levels(descriptions, tensors, contents)
    moves, passed, hops, why = _plan(tensors, gone, options, meeting, budget, contents, levels)
    ends = [{rank for tensor in tensors for rank in getattr(tensor, side).ranks} for side in SIDES]
    # A relay has rounds, also where it passes nothing on.
    has_parts = bool(passed or hops or levels or contents is not None or any(each.round for each in moves))
    agreement = Agreement(
        place=place,
        gone=gone,
        budget=budget,
        tensors=tensors,
        moves=moves,
        own=range(len(moves)) if has_parts else own_moves(moves, meeting.rank),
        passed=passed,
        hops=hops,
        why=why,
        hosts=meeting.owns,
        ends=(ends[0], ends[1]),
        ranks=sorted({*ends[0], *ends[1]} - gone),
        device_type=tensors[0].source.device if tensors else "cpu",
        left_out=left_out,
        tied={names for description in descriptions.values() for names in description.tied},
        multi_mesh=frozenset([tensor.name for tensor in tensors if tensor.source.meshes > 1]),
        contents=contents,
        files=own.files,
        paths=own.paths,
        levels=levels,
    )
    return agreement, meeting, own.sides


def _admitted(
    place: Place,
    fleet: Fleet,
    descriptions: Mapping[int, Description],
    fits: Callable[[Mapping[int, Description]], object],
) -> dict[int, Description]:
    """Leave out the units that don't fit the trainers and the units before them; the same on all ranks. Raises what is
    wrong on a rank of such a unit, and on all ranks what is wrong with a trainer."""
    there = {rank: descriptions[rank] for rank in range(fleet.trainers)}
    wrong = {rank: [said.problem] for rank, said in there.items() if said.problem is not None}
    idle = [rank for rank, said in there.items() if said.gives_nothing]
    if wrong or idle:
        texts = by_sentence(wrong)
        texts += [f"{of_ranks(idle)} of the trainers at an open place: each of them gives some tensors"] if idle else []
        raise ValueError("; ".join(texts))
    own: ValueError | None = None
    trainers = there
    for unit in fleet.units:
        of_unit = {rank: descriptions[rank] for rank in unit.ranks}
        with_unit = there | of_unit
        try:
            fits(trainers | of_unit)  # first alone, so that an error speaks of this unit
            fits(with_unit)
        except ValueError as error:
            fleet.refuse(unit.number, str(error))
            own = error if place.rank in unit.ranks else own
        else:
            there = with_unit
    if own is not None:
        raise own
    return there


def _compared(
    sides: Sides, descriptions: Mapping[int, Description], strict: bool
) -> tuple[Contents | None, list[Tensor], dict[str, tuple[str, ...]]]:
    """Compare both sides. Returns the checkpoint, if it is the source, the tensors, and the names of one side alone."""
    contents = contents_of(descriptions)
    if contents is not None:
        sides = sides.read_from(contents, descriptions)
    return contents, *sides.tensors(strict)


def _plan(
    tensors: Sequence[Tensor],
    gone: frozenset[int],
    options: Options,
    meeting: Meeting,
    budget: int,
    contents: Contents | None,
    levels: Mapping[str, int],
) -> tuple[list[TensorMove], list[PassedOn], Hops | None, str]:
    """List all moves, the same on every rank. Returns those from the source, those by which targets are passed on in
    each run, or in some, and why they are, or aren't."""
    shares: list[list[list[Stretch]]] = []
    as_read = tensors
    if contents is not None:
        if options.changes:
            raise ValueError("changes= compares tensors of two runs, and the source is a checkpoint. Leave it out.")
        shares = contents.shares({tensor.name: tensor.target for tensor in tensors}, bytes_to_read_into(budget))
        as_read = tensors_as_read(tensors, contents, shares)
    is_passed, why, hops = bool(options.relay), "", None
    if options.relay is None and not (options.changes and levels):
        is_passed, why = passes_on(as_read, meeting.owns)
        if is_passed and options.changes:
            first = moves_of(tensors, gone, relays := relays_of(tensors, meeting.owns))
            hops = Hops(first, hops_of(first, relays))
            is_passed, why = False, f"{why}, in runs that would send more than that"
    hosts = meeting.owns if is_passed else None
    if levels:
        relays = passings_by_turn(as_read, levels, hosts)
    else:
        relays = relays_of(as_read, hosts, has_rounds=contents is None) if hosts is not None else {}
    if contents is None:
        moves = moves_of(tensors, gone, relays)
    else:
        moves = moves_of_checkpoint(tensors, contents, shares, meeting.rank, relays)
    check_nothing_is_lost(moves, gone)
    return moves, hops_of(moves, relays), hops, why


def _levels(
    descriptions: Mapping[int, Description], tensors: Sequence[Tensor], contents: Contents | None
) -> dict[str, int]:
    """Return the turns of the names that come in stages; the same on all ranks. Raises a ValueError if none fit."""
    there = {tensor.name for tensor in tensors}
    torn = {rank: torn_groups(said.stages, there) for rank, said in descriptions.items() if said.stages and tensors}
    levels = levels_of(said.stages for said in descriptions.values())
    if contents is not None and levels:
        raise ValueError(
            "stages= takes tensors as the source, and the source is a checkpoint: read it into tensors, and give these."
        )
    raise_if_any(by_sentence({rank: texts for rank, texts in torn.items() if texts}))
    return {name: level for name, level in levels.items() if name in there}


def _compare_replicas(meeting: Meeting, timeout: timedelta, sources: Mapping[str, Given], sides: Sides) -> None:
    """Check that what several ranks give of a source has one value. Collective."""
    meeting.timeout = timeout
    problem, own = None, {}
    try:
        own = {n: digests_of(n, given, sides.replicated[n]) for n, given in sources.items() if n in sides.replicated}
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor can't be read; the others wait for this rank
        problem = str(error)
    said = meeting.say([problem, own])
    raise_if_any(by_sentence({rank: [text] for rank, (text, _) in sorted(said.items()) if text is not None}))
    problems = replica_problems({rank: boxed(of_rank) for rank, (_, of_rank) in said.items()}, sides.source)
    raise_if_any([problem.text for problem in problems])


def refuse_transfer(place: Place, why: str) -> None:
    """Tell the other ranks of a place, which make a `Transfer`, that this rank can't. Collective over the place.

    All other ranks raise a ValueError with `why` at once. Otherwise they would wait for this rank until the timeout.
    """
    place.meeting("A Transfer").say(as_data(Description({}, {}, why)))
