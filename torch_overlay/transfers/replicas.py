"""Compare the values of replicas: of a box of a source that several ranks hold, and of the sources of tied targets.

Ranks compare digests of the values, and send no values for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..distributed._mesh.text import of_ranks
from .descriptions import SIDES, Description, Problem, boxed
from .pieces import digest
from .sharding import replicated_sharding

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ..distributed.tensor._planner.regions import Box
    from .blocks import Locals
    from .bound_tensors import BoundTensor
    from .checkpoint import Contents
    from .descriptions import Tensor
    from .meeting import Meeting
    from .team import Team
    from .tensor_moves import TensorMove

    Digests = Mapping[str, Sequence[tuple[Box, str]]]  # by name, boxes of a tensor with the digests of their values

# Stands for the source's sharding on a rank that doesn't know it: another rank said that the tensor is in pieces.
_SOME_PIECES = replicated_sharding("uint8", (), (), "cpu")._replace(pieces=((),))


def replica_problems(
    descriptions: Sequence[tuple[Description, list[int]]], known: Sequence[Problem] = ()
) -> list[Problem]:
    """Find plain sources, and pieces of equal boxes, whose digests differ between ranks. Empty if none do."""
    by_box: dict[tuple[str, Box], dict[str, list[int]]] = {}
    for description, ranks in descriptions:
        for name, digests in (description.digests or {}).items():
            for box, value in digests:
                by_box.setdefault((name, box), {}).setdefault(value, []).extend(ranks)
    problems, wrong = [], {problem.name for problem in known}
    # In order of name and box, so that all ranks name the same problems first.
    for (name, box), values in sorted(by_box.items()):
        if len(values) == 1 or name in wrong:
            continue
        on = f"on {', another on '.join([of_ranks(sorted(ranks)) for ranks in values.values()])}"
        if any(description.source[name].pieces for description, _ in descriptions if name in description.source):
            at = f"has pieces of shape {box.length} that start at {box.start}"
            text = f"the source {name!r} {at}, with one value {on}"
        elif any(description.source[name].meshes > 1 for description, _ in descriptions if name in description.source):
            text = (
                f"the source {name!r} lies on several meshes, which are replicas then, and its part of shape "
                f"{box.length} that starts at {box.start} has one value {on}: give what differs, as experts do, other "
                "names, or say with piece() which part of a whole each mesh has"
            )
        else:
            text = (
                f"the source {name!r} is a plain tensor, and so a replica, and has one value {on}: give shards as "
                "DTensors, or say with piece() what each one holds"
            )
        problems.append(Problem(0, len(SIDES), name, text))
    return problems


def tied_problems(groups: Iterable[tuple[str, ...]], digests: Mapping[int, Digests]) -> list[str]:
    """Say which targets are one block of memory although their sources differ, or are cut so that nothing says that
    they are equal: the last one written would win. Empty if there are none."""
    by_name: dict[str, dict[Box, str]] = {}
    for of_rank in digests.values():
        for name, boxes in of_rank.items():
            by_name.setdefault(name, {}).update(boxes)
    problems = []
    for first, *others in groups:
        for other in others:
            values, other_values = by_name.get(first, {}), by_name.get(other, {})
            if values == other_values:
                continue
            why = "have different values"
            if values.keys() != other_values.keys():
                why = "are cut in different ways, so that nothing says that they are equal"
            problems.append(
                f"the targets {first!r} and {other!r} are one block of memory, as tied weights are, and their sources "
                f"{why}: leave one of them out"
            )
    return problems


def source_digests(
    sources: Sequence[BoundTensor | None],
    locals_: Locals,
    moves: Sequence[TensorMove],
    is_asked: Callable[[BoundTensor], bool],
) -> dict[str, list[tuple[Box, str]]]:
    """Read this rank's sources, and return for each name the boxes that it has with the digests of their values. Empty
    boxes are left out."""
    digests: dict[str, list[tuple[Box, str]]] = {}
    seen = set()  # one piece is the source of several moves if several pieces of the target want some of it
    for source, local, move in zip(sources, locals_, moves):
        piece = move.tensor.name, move.numbers[0]
        if source is not None and local is not None and piece not in seen and is_asked(source):
            part = source.part(local)
            if part is not None:
                digests.setdefault(move.tensor.name, []).append((part.box, digest(local)))
            seen.add(piece)
    return digests


def replica_problems_now(
    team: Team,
    tensors: Iterable[Tensor],
    tied: Iterable[tuple[str, ...]],
    sources: Sequence[BoundTensor | None],
    locals_: Locals,
    moves: Sequence[TensorMove],
    multi_mesh: Collection[str],
    are_all_asked: bool,
    are_ties_apart: bool,
) -> list[str]:
    """Compare the replicas of the sources before a run, and the sources of tied targets. Collective over the team.

    Sources that lie on several meshes are compared in each run, since nothing else says that they are replicas: when
    the Transfer was made, experts of one name may all have been zero. So are the sources of tied targets, unless they
    are tied, too. For `run(check=True)`, plain tensors and pieces are compared as well. Replicas on one mesh aren't:
    they are the program's affair.
    """
    tied = sorted(tied) if are_all_asked or are_ties_apart else []
    asked = {name for names in tied for name in names} | {*multi_mesh}
    own = source_digests(
        sources,
        locals_,
        moves,
        lambda source: source.name in asked or (are_all_asked and source.box is not None),
    )
    shardings = {tensor.name: tensor.source for tensor in tensors}
    # Where planners planned, a rank has only its own tensors in `tensors`, and can't tell pieces of another from plain.
    reports = team.gather_data([own, [name for name in own if shardings[name].pieces]])
    digests = {rank: boxed(of_rank) for rank, (of_rank, _) in sorted(reports.items())}
    shardings |= {name: _SOME_PIECES for _, names in reports.values() for name in names}
    moved = {name for of_rank in digests.values() for name in of_rank}  # as all ranks see it
    groups = [names for names in tied if moved.issuperset(names)]
    descriptions = [(Description(shardings, {}, None, of_rank), [rank]) for rank, of_rank in digests.items()]
    return [problem.text for problem in replica_problems(descriptions)] + tied_problems(groups, digests)


def check_tied_targets(
    meeting: Meeting,
    tied: Iterable[tuple[str, ...]],
    sources: Sequence[BoundTensor | None],
    locals_: Locals,
    moves: Sequence[TensorMove],
) -> None:
    """Check that targets which are one block of memory have sources of equal values. Collective over the meeting."""
    tied = sorted(tied)
    tied_names = {name for names in tied for name in names}
    own = source_digests(sources, locals_, moves, lambda source: source.name in tied_names)
    problems = tied_problems(tied, {rank: boxed(of_rank) for rank, of_rank in meeting.say(own).items()})
    if problems:
        raise ValueError(f"A Transfer can't write to what its target is: {'; '.join(problems)}.")


def check_tied_entries(tied: Iterable[tuple[str, ...]], tensors: Iterable[Tensor], contents: Contents) -> None:
    """Check that targets which are one block of memory take one tensor of a checkpoint.

    Whether two tensors of a checkpoint are equal isn't known before they are read, and they are read in different
    rounds.
    """
    moved = {tensor.name for tensor in tensors}
    for names in sorted(tied):
        given = [name for name in names if name in moved]
        entries = sorted({contents.numbers[name] for name in given})
        if len(entries) > 1:
            both = " and ".join([repr(contents.entries[number].name) for number in entries])
            raise ValueError(
                f"The targets {', '.join(map(repr, given))} are one block of memory, as tied weights are, and the "
                f"checkpoint has {both} for them: leave all but one out of the target, with strict=False."
            )
