"""What digests of values say of replicas: of a box of a source that several ranks hold, and of the sources of tied
targets. `source_values.py` reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..distributed._mesh.text import of_ranks
from .descriptions import SIDES, Problem

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ..distributed.tensor._planner.boxes import Box
    from .checkpoint import Contents
    from .descriptions import Tensor
    from .sharding import Sharding

    Digests = Mapping[str, Sequence[tuple[Box, str]]]  # by name, boxes of a tensor with the digests of their values


def replica_problems(
    digests: Mapping[int, Digests], sources: Mapping[str, Sharding], on_meshes: Collection[str] = ()
) -> list[Problem]:
    """Find plain sources, pieces of equal boxes, and replicas of DTensors, whose digests differ between ranks. Empty if
    none do."""
    by_box: dict[tuple[str, Box], dict[str, list[int]]] = {}
    for rank, of_rank in sorted(digests.items()):
        for name, boxes in of_rank.items():
            for box, value in boxes:
                by_box.setdefault((name, box), {}).setdefault(value, []).append(rank)
    problems = []
    # In order of name and box, so that all ranks name the same problems first.
    for (name, box), values in sorted(by_box.items()):
        if len(values) == 1:
            continue
        on = f"on {', another on '.join([of_ranks(sorted(ranks)) for ranks in values.values()])}"
        if sources[name].pieces:
            at = f"has pieces of shape {box.length} that start at {box.start}"
            text = f"the source {name!r} {at}, with one value {on}"
        elif name in on_meshes:
            text = (
                f"the source {name!r} is replicated on its mesh, and its part of shape {box.length} that starts at "
                f"{box.start} has one value {on}: the replicas have drifted apart, so make them equal first, as a "
                "broadcast from one of them does"
            )
        elif sources[name].meshes > 1:
            text = (
                f"the source {name!r} lies on several meshes, which are replicas then, and its part of shape "
                f"{box.length} that starts at {box.start} has one value {on}: give what differs, as experts do, other "
                "names, or say with piece() which part of a whole each mesh has"
            )
        else:
            text = (
                f"the source {name!r} is a plain tensor, and so a replica, and has one value {on}: give it on "
                "one rank alone, shards as DTensors, or say with piece() what each one holds"
            )
        problems.append(Problem(0, len(SIDES), name, text))
    return problems


def tied_problems(groups: Iterable[tuple[str, ...]], digests: Mapping[int, Digests]) -> list[str]:
    """Say which targets are one block of memory although their sources differ: the last one written would win. Empty if
    there are none."""
    by_name: dict[str, dict[Box, str]] = {}
    for of_rank in digests.values():
        for name, boxes in of_rank.items():
            by_name.setdefault(name, {}).update(boxes)
    problems = []
    for first, *others in groups:
        for other in others:
            if by_name.get(first, {}) != by_name.get(other, {}):
                problems.append(
                    f"the targets {first!r} and {other!r} are one block of memory, as tied weights are, and their "
                    "sources have different values: leave one of them out, or tie them at the source, too"
                )
    return problems


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
