"""Compare the values of replicas, and of the sources of tied targets, as they are now.

Ranks tell one another digests of the values; `replicas.py` says what they mean.
"""

from __future__ import annotations

import hashlib
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..distributed.tensor._runner.exchange import part as view
from .checkpoint import boxes_by_rank
from .descriptions import boxed
from .pieces import digest
from .replicas import replica_problems, tied_problems
from .trees import with_paths

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ..distributed.tensor._planner.boxes import Box
    from ..rendezvous.meeting import Meeting
    from ..rendezvous.team import Team
    from .agreement import Agreement
    from .blocks import Locals
    from .bound_tensors import BoundTensor
    from .descriptions import Tensor
    from .tensor_moves import TensorMove


def source_digests(
    sources: Sequence[BoundTensor | None],
    locals_: Locals,
    moves: Sequence[TensorMove],
    is_asked: Callable[[BoundTensor], bool],
    cut_at: Mapping[str, Sequence[Box]] = MappingProxyType({}),
) -> dict[str, list[tuple[Box, str]]]:
    """Read this rank's sources, and return for each name the boxes that it has with the digests of their values. Empty
    boxes are left out. Of the names in `cut_at` these boxes, as far as this rank has them."""
    digests: dict[str, list[tuple[Box, str]]] = {}
    seen = set()  # one piece is the source of several moves if several pieces of the target want some of it
    for source, local, move in zip(sources, locals_, moves):
        piece = move.tensor.name, move.numbers[0]
        if source is not None and local is not None and piece not in seen and is_asked(source):
            part = source.part(local)
            if part is not None:
                name, own = move.tensor.name, part.box
                inside = [box for box in cut_at.get(name, [own]) if box.meet(own) == box]
                digests.setdefault(name, []).extend([(box, digest(view(local, box.inside(own)))) for box in inside])
            seen.add(piece)
    return digests


def _common_boxes(tensors: Iterable[Tensor], tied: Iterable[tuple[str, ...]]) -> dict[str, list[Box]]:
    """Return, for tied names whose sources are cut in different ways, boxes that each of them has as a whole on some
    rank. Their digests say whether the sources are equal."""
    sources = {tensor.name: tensor.source for tensor in tensors}
    common: dict[str, list[Box]] = {}
    for names in tied:
        cuts = [
            {box for boxes in boxes_by_rank(sources[name]).values() for box in boxes if box.elements}
            for name in names
            if name in sources
        ]
        if any(boxes != cuts[0] for boxes in cuts):
            for boxes in cuts[1:]:
                cuts[0] = {both for one in cuts[0] for other in boxes if (both := one.meet(other)).elements}
            common |= dict.fromkeys(names, sorted(cuts[0]))
    return common


def replica_problems_now(
    team: Team,
    agreement: Agreement,
    sources: Sequence[BoundTensor | None],
    locals_: Locals,
    are_all_asked: bool,
    are_ties_apart: bool,
) -> list[str]:
    """Compare the replicas of the sources before a run, and the sources of tied targets. Collective over the team.

    Sources that lie on several meshes are compared in each run, since nothing else says that they are replicas: when
    the Transfer was made, experts of one name may all have been zero. So are the sources of tied targets, unless they
    are tied, too. For `run(check=True)`, plain tensors, pieces and replicas on one mesh are compared as well.
    """
    moves = agreement.moves
    tied = sorted(agreement.tied) if are_all_asked or are_ties_apart else []
    asked = {name for names in tied for name in names} | agreement.multi_mesh
    own = source_digests(
        sources,
        locals_,
        moves,
        lambda source: source.name in asked or (are_all_asked and source.box is not None),
        _common_boxes(agreement.tensors, tied),
    )
    on_mesh, by_group = _of_replicas_on_a_mesh(sources, locals_, moves, asked) if are_all_asked else ({}, {})
    reports = team.gather_data([own, by_group])
    digests = {rank: boxed(of_rank) for rank, (of_rank, _) in sorted(reports.items())}
    seen: dict[str, set[str]] = {}
    for _, groups_of_rank in reports.values():
        for group, value in groups_of_rank.items():
            seen.setdefault(group, set()).add(value)
    drifted = {group for group, values in seen.items() if len(values) > 1}
    on_meshes: set[str] = set()
    if drifted:  # then all ranks see it, and those that hold something of it say what
        said = {name: boxes for group in drifted for name, boxes in on_mesh.get(group, {}).items()}
        for rank, of_rank in sorted(team.gather_data(said).items()):
            digests[rank] |= boxed(of_rank)
            on_meshes |= of_rank.keys()
    moved = {name for of_rank in digests.values() for name in of_rank}  # as all ranks see it
    groups = [names for names in tied if moved.issuperset(names)]
    problems = replica_problems(digests, {tensor.name: tensor.source for tensor in agreement.tensors}, on_meshes)
    return [problem.text for problem in problems] + tied_problems(groups, digests)


def _of_replicas_on_a_mesh(
    sources: Sequence[BoundTensor | None], locals_: Locals, moves: Sequence[TensorMove], others: Collection[str]
) -> tuple[dict[str, dict[str, list[tuple[Box, str]]]], dict[str, str]]:
    """Return, for each group of ranks that hold the same boxes of DTensors, what this rank has of these by name; and
    one digest of all of that, so that ranks usually tell one another a line for each group and not for each tensor."""
    replicas = {source.name: source.replicas for source in sources if source is not None and source.name not in others}
    held = {
        name: hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        for name, ranks in replicas.items()
        if len(ranks) > 1
    }
    by_group: dict[str, dict[str, list[tuple[Box, str]]]] = {}
    for name, boxes in source_digests(sources, locals_, moves, lambda source: source.name in held).items():
        by_group.setdefault(held[name], {})[name] = boxes
    return by_group, {
        group: hashlib.blake2b(repr(sorted(names.items())).encode(), digest_size=16).hexdigest()
        for group, names in by_group.items()
    }


def check_tied_targets(
    meeting: Meeting, agreement: Agreement, sources: Sequence[BoundTensor | None], locals_: Locals
) -> None:
    """Check that targets which are one block of memory have sources of equal values. Collective over the meeting."""
    tied = sorted(agreement.tied)
    names, cut_at = {name for names in tied for name in names}, _common_boxes(agreement.tensors, tied)
    own = source_digests(sources, locals_, agreement.moves, lambda source: source.name in names, cut_at)
    problems = tied_problems(tied, {rank: boxed(of_rank) for rank, of_rank in meeting.say(own).items()})
    if problems:
        text = with_paths("; ".join(problems), agreement.paths)
        raise ValueError(f"A Transfer can't write to what its target is: {text}.")
