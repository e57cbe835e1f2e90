"""Descriptions: what each rank says of its tensors before a transfer, put together and compared.

A rank knows the tensors that it has a part in. With pipeline stages or with two disjoint meshes no rank knows them all,
so ranks tell one another; then all of them have the same list, find the same mistakes, and raise the same error.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..distributed._mesh.text import of_ranks
from ..distributed.tensor._planner.regions import NotPlanned, Regions
from ..distributed.tensor._runner.specs import read_cuts
from ._planner.memory import Shared
from ._planner.sides import Ranks
from .given import Pieces, digests_of, own_tensors, part_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from ..distributed.tensor._planner.regions import Box
    from ._planner.memory import Part
    from .given import Given, Names, Plain
    from .place import Place

SIDES = "source", "target"
CASTS = frozenset({"float64", "float32", "float16", "bfloat16"})  # each to each
SHOWN = 5  # problems in one message


class Layout(NamedTuple):
    """How a tensor lies on a mesh.

    Attributes:
        dtype: its name.
        regions: which coordinate holds what.
        ranks: of the mesh, row-major; or those that have pieces.
        device: the type of device that the mesh is for.
        pieces: instead of a mesh, for each of these ranks the boxes that it has; a rank that says its own has no ranks.
    """

    dtype: str
    regions: Regions
    ranks: tuple[int, ...]
    device: str
    pieces: tuple[tuple[Box, ...], ...] = ()

    def __str__(self) -> str:
        shape, sizes = tuple(self.regions.shape), self.regions.sizes
        if self.pieces:
            return f"{self.dtype} of shape {shape}, in pieces,"
        if not self.ranks:
            return f"{self.dtype} of shape {shape}, a plain tensor,"
        return f"{self.dtype} of shape {shape}, {self.regions} on a mesh of sizes {sizes} over {of_ranks(self.ranks)}"


class Description(NamedTuple):
    """What a rank says.

    Attributes:
        source, target: its tensors, by name.
        problem: why it can't take part; None if it can.
        digests: of the values of plain sources and of pieces, by box.
        tied: names of its targets that are one block of memory.
        budget, strict: as it gave them; None if it takes no part.
    """

    source: dict[str, Layout]
    target: dict[str, Layout]
    problem: str | None = None
    digests: Mapping[str, Sequence[tuple[Box, str]]] | None = None
    tied: Sequence[tuple[str, ...]] = ()
    budget: int | None = None
    strict: bool | None = None


class Described(NamedTuple):
    """What a rank says of its two trees, and what it read in them.

    Attributes:
        error: because of which it has a problem, if reading them raised one.
    """

    description: Description
    sides: tuple[dict[str, Given], dict[str, Given]]
    error: Exception | None = None


class Tensor(NamedTuple):
    """One tensor of a transfer, as all ranks agree on it."""

    name: str
    source: Layout
    target: Layout

    @property
    def sides(self) -> tuple[Layout, Layout]:
        """Its source and its target."""
        return self.source, self.target

    @property
    def wire(self) -> torch.dtype:
        """The type in which it travels: of both sides' types the narrower one, the target's of two as wide."""
        types = getattr(torch, self.source.dtype), getattr(torch, self.target.dtype)
        return types[0] if types[0].itemsize < types[1].itemsize else types[1]

    @property
    def is_cast(self) -> bool:
        """Whether it changes its type."""
        return self.source.dtype != self.target.dtype


def describe(source: Any, target: Any, names: Names, place: Place | None = None) -> Described:
    """Both sides of a transfer on this rank. Any error becomes the rank's problem, so that all ranks hear of it at
    once: the others would wait in the store until the timeout for a rank that raised."""
    try:
        sides = own_tensors(source, SIDES[0], names), own_tensors(target, SIDES[1])
        meshes = Meshes(place)
        layouts = [_layouts(side, meshes) for side in sides]
        wrong = [
            misfit(name, tensor, some[name].regions, meshes)
            for side, some in zip(sides, layouts)
            for name, tensor in side.items()
            if isinstance(tensor, DTensor)
        ]
        wrong += [
            f"the source {name!r} has a pending reduction ({layout.regions}): redistribute it on its mesh first"
            for name, layout in layouts[0].items()
            if layout.regions.pending
        ]
        problem = "; ".join(dict.fromkeys(filter(None, wrong)))
        if problem:
            return Described(Description(layouts[0], layouts[1], problem), sides)
        targets = [part for name, own in sides[1].items() for part in _parts(name, own, layouts[1][name], meshes)]
        shared = Shared.of({}, dict(enumerate(targets)))
        problem = "; ".join(shared_targets(shared))
        digests = {name: digests_of(own) for name, own in sides[0].items() if not isinstance(own, DTensor)}
        return Described(Description(layouts[0], layouts[1], problem or None, digests, shared.tied), sides)
    except (TypeError, ValueError, RuntimeError, NotPlanned) as error:  # torch's own, of what has no values, too
        return Described(Description({}, {}, str(error)), ({}, {}), error)
    except Exception as error:  # as names= may raise any; the name of its class says more than its words
        return Described(Description({}, {}, f"{type(error).__name__}: {error}"), ({}, {}), error)


def _parts(name: str, own: Given, layout: Layout, meshes: Meshes) -> list[Part]:
    """Which boxes of a tensor lie where on this rank."""
    if isinstance(own, DTensor):
        here = meshes.see(own.device_mesh).here
        found = [] if here is None else [part_of(name, layout.regions.box(here), own._local_tensor)]
    else:
        pieces = own.pieces if isinstance(own, Pieces) else (own,)
        found = [part_of(name, piece.place[1], piece._local_tensor) for piece in pieces]
    return [part for part in found if part is not None]


def shared_targets(shared: Shared) -> list[str]:
    """That targets lie in the same memory, in words, for each two names."""
    return [
        f"the targets {first!r} and {second!r} share memory, and aren't one block: give each memory of its own, or one "
        "of them"
        if first != second
        else f"pieces of the target {first!r} share memory, and are different parts of it"
        for first, second in shared.clashes
    ]


def _layouts(tensors: Mapping[str, Given], meshes: Meshes) -> dict[str, Layout]:
    return {
        name: layout_of(name, own, meshes) if isinstance(own, DTensor) else _of_plain(own)
        for name, own in tensors.items()
    }


def _of_plain(own: Plain | Pieces) -> Layout:
    """Over no ranks: those who give it become known when all have said what they have."""
    first = own.pieces[0] if isinstance(own, Pieces) else own
    local = first._local_tensor
    layout = _whole(str(local.dtype).removeprefix("torch."), first.place[0], (), local.device.type)
    if isinstance(own, Pieces):
        return layout._replace(pieces=(tuple([piece.place[1] for piece in own.pieces]),))
    return layout


def _whole(dtype: str, shape: tuple[int, ...], ranks: Sequence[int], device: str) -> Layout:
    sizes = (len(ranks),) if ranks else ()
    regions = regions_on((Replicate(),) * len(sizes), None, shape, sizes)
    return Layout(dtype, regions, tuple(ranks), device)


class Seen(NamedTuple):
    """What is asked of a mesh for each of its tensors.

    Attributes:
        mesh: itself, so that no other one gets its id meanwhile.
        ranks: row-major.
        here: where this rank stands; None if it doesn't.
    """

    mesh: DeviceMesh
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    here: tuple[int, ...] | None


class Meshes:
    """The meshes of one call, each looked at once; where worlds meet, with the ranks as that place numbers them."""

    def __init__(self, place: Place | None = None) -> None:
        self._place = place
        self._seen: dict[int, Seen] = {}
        self._ranks: dict[int, Ranks] = {}

    @property
    def rank(self) -> int:
        """This one, as errors call it."""
        return dist.get_rank() if self._place is None else self._place.rank

    def see(self, mesh: DeviceMesh) -> Seen:
        """What it is like."""
        found = self._seen.get(id(mesh))
        if found is None:
            here = mesh.get_coordinate()
            ranks = tuple(mesh.mesh.flatten().tolist())
            if self._place is not None:
                ranks = self._place.of_world(ranks)
            found = Seen(mesh, ranks, tuple(mesh.shape), here and tuple(here))
            self._seen[id(mesh)] = found
        return found

    def ranks(self, mesh: DeviceMesh) -> Ranks:
        """Its ranks, as planned with."""
        if id(mesh) not in self._ranks:
            seen = self.see(mesh)
            self._ranks[id(mesh)] = Ranks.of(seen.ranks, seen.sizes)
        return self._ranks[id(mesh)]


def misfit(name: str, tensor: DTensor, regions: Regions, meshes: Meshes) -> str | None:
    """What is wrong, in words, if this rank holds of a tensor what its placements don't say."""
    here, held = meshes.see(tensor.device_mesh).here, tensor._local_tensor.shape
    wanted = held if here is None else regions.box(here).length
    if wanted == held:
        return None
    return f"{name!r} has shape {tuple(held)} on rank {meshes.rank}, where {tensor.placements} say {wanted}"


def layout_of(name: str, tensor: DTensor, meshes: Meshes) -> Layout:
    """How a DTensor lies. Raises as `regions_of`."""
    mesh = tensor.device_mesh
    return Layout(
        str(tensor.dtype).removeprefix("torch."),
        regions_of(name, tensor, meshes),
        meshes.see(mesh).ranks,
        mesh.device_type,
    )


def regions_of(name: str, tensor: DTensor, meshes: Meshes) -> Regions:
    """Which coordinate holds what of a DTensor.

    Raises:
        NotPlanned: its shards are no boxes, or what is pending is no plain reduction.
    """
    spec = tensor._spec
    odd = [type(each).__name__ for each in spec.placements if each.is_partial() and type(each) is not Partial]
    if odd:  # its terms aren't brought together by its operation alone
        raise NotPlanned(f"{name!r} has a pending {odd[0]}. Redistribute it on its mesh first")
    sizes = meshes.see(tensor.device_mesh).sizes
    try:
        return regions_on(spec.placements, getattr(spec, "shard_order", None), tuple(tensor.shape), sizes)
    except NotPlanned as error:
        raise NotPlanned(f"{name!r} with placements {spec.placements}: {error}") from error


def regions_on(
    placements: tuple[Placement, ...], order: Any, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> Regions:
    """What placements say of a shape on a mesh of these sizes. Raises NotPlanned where shards are no boxes."""
    return _regions_on(placements, tuple(map(type, placements)), order, shape, sizes)


# By class, too: a subclass of Partial calls itself equal to it.
@lru_cache(maxsize=1024)
def _regions_on(
    placements: tuple[Placement, ...],
    kinds: tuple[type, ...],
    order: Any,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
) -> Regions:
    return read_cuts(placements, order, len(shape), sizes).on(shape, sizes)


def agreed(
    said: Mapping[int, Description], gone: frozenset[int] = frozenset(), strict: bool = True
) -> tuple[list[Tensor], dict[str, tuple[str, ...]]]:
    """The tensors of a transfer, from what all ranks say that aren't gone, in order of name; and, if it isn't strict,
    what only one side has.

    Raises:
        ValueError: something doesn't fit; names the tensors.
    """
    _stop(by_sentence({rank: [each.problem] for rank, each in sorted(said.items()) if each.problem is not None}))
    _check_strict(said)
    problems: list[str] = []
    alike = _alike(said)
    sides = [_one_side(alike, side, problems, gone) for side in SIDES]
    problems += unlike(alike)
    _stop(problems)
    both = sorted(sides[0].keys() & sides[1].keys())
    alone = {side: tuple(sorted(found.keys() - set(both))) for side, found in zip(SIDES, sides)}
    if not strict and not both:
        problems.append("they have no name in common")
    for name in both if not strict and both else sorted({*sides[0], *sides[1]}):
        problems += _differences(name, *[side.get(name) for side in sides])
    _stop(problems)
    return [Tensor(name, sides[0][name], sides[1][name]) for name in both], alone


def _check_strict(said: Mapping[int, Description]) -> None:
    """ValueError, on all ranks, if they don't give the same `strict`: those that don't leave names out would stop, and
    the others wait for them."""
    by_value: dict[bool | None, list[int]] = {}
    for rank, description in sorted(said.items()):
        by_value.setdefault(description.strict, []).append(rank)
    if len(by_value) > 1:
        given = ", and ".join(f"strict={strict} on {of_ranks(ranks)}" for strict, ranks in by_value.items())
        raise ValueError(f"All ranks of a Transfer give the same strict=; got {given}.")


def _alike(said: Mapping[int, Description]) -> list[tuple[Description, list[int]]]:
    """Each description with the ranks that said it: on a mesh all say the same, and it is looked at once."""
    found: dict[int, tuple[Description, list[int]]] = {}
    for rank, description in sorted(said.items()):
        found.setdefault(id(description), (description, []))[1].append(rank)
    return [*found.values()]


def unlike(alike: Sequence[tuple[Description, list[int]]]) -> list[str]:
    """Plain sources, or pieces with one place, that differ."""
    by_place: dict[tuple[str, Box], dict[str, list[int]]] = {}
    for description, ranks in alike:
        for name, found in (description.digests or {}).items():
            for box, seen in found:
                by_place.setdefault((name, box), {}).setdefault(seen, []).extend(ranks)
    problems = []
    for (name, box), values in sorted(by_place.items()):
        if len(values) == 1:
            continue
        on = f"on {', another on '.join([of_ranks(sorted(ranks)) for ranks in values.values()])}"
        if any(description.source[name].pieces for description, _ in alike if name in description.source):
            at = f"has pieces of shape {box.length} that start at {box.start}"
            problems.append(f"the source {name!r} {at}, with one value {on}")
        else:
            problems.append(
                f"the source {name!r} is a plain tensor, and so a replica, and has one value {on}: give shards as "
                "DTensors, or say with piece() what each one holds"
            )
    return problems


def untied(
    groups: Iterable[tuple[str, ...]], values: Mapping[int, Mapping[str, Sequence[tuple[Box, str]]]]
) -> list[str]:
    """Which targets can't be one block of memory, since their sources' values differ.

    Args:
        groups: names whose targets are one block on some rank.
        values: by rank, digests of what it has of their sources, by name.
    """
    by_name: dict[str, dict[Box, str]] = {}
    for said in values.values():
        for name, found in said.items():
            by_name.setdefault(name, {}).update(found)
    problems = []
    for names in groups:
        first, *others = names
        for other in others:
            one, two = by_name.get(first, {}), by_name.get(other, {})
            if one == two:
                continue
            why = "have different values"
            if one.keys() != two.keys():
                why = "are cut in different ways, so that nothing says that they are equal"
            problems.append(
                f"the targets {first!r} and {other!r} are one block of memory, as tied weights are, and their sources "
                f"{why}: leave one of them out"
            )
    return problems


def _one_side(
    alike: Sequence[tuple[Description, list[int]]], side: str, problems: list[str], gone: frozenset[int]
) -> dict[str, Layout]:
    """The layouts of one side; every rank of a mesh must have the tensor, and all must say the same of it."""
    found: dict[str, dict[Layout, list[int]]] = {}
    for description, ranks in alike:
        for name, layout in getattr(description, side).items():
            found.setdefault(name, {}).setdefault(layout, []).extend(ranks)
    for name, by_layout in found.items():
        _join_pieces(by_layout)
        if len(by_layout) == 1 and not (plain := next(iter(by_layout))).ranks:
            ranks = sorted(by_layout.pop(plain))
            by_layout[_whole(plain.dtype, tuple(plain.regions.shape), ranks, plain.device)] = ranks
        if len(by_layout) > 1:
            views: dict[str, list[int]] = {}
            for layout, ranks in by_layout.items():
                views.setdefault(str(layout), []).extend(ranks)
            said = ", and ".join(f"{view} on {of_ranks(sorted(ranks))}" for view, ranks in views.items())
            problems.append(f"the {side} {name!r} is {said}")
        known = {rank for ranks in by_layout.values() for rank in ranks}
        (layout, (rank, *_)), *_ = by_layout.items()
        missing = [other for other in layout.ranks if other not in known and other not in gone]
        if missing:
            lack = f"{of_ranks(missing)} {_do(missing)}n't have it"
            problems.append(f"the {side} {name!r} of rank {rank} is {layout}, and {lack}")
    return {name: next(iter(by_layout)) for name, by_layout in found.items()}


def _join_pieces(by_layout: dict[Layout, list[int]]) -> None:
    """Pieces of one tensor, each rank with its own, are one layout."""
    kinds = {layout._replace(pieces=()) for layout in by_layout}
    if len(kinds) > 1 or not all(layout.pieces for layout in by_layout):
        return
    given = {rank: layout.pieces[0] for layout, ranks in by_layout.items() for rank in ranks}
    ranks = sorted(given)
    by_layout.clear()
    by_layout[kinds.pop()._replace(ranks=tuple(ranks), pieces=tuple([given[rank] for rank in ranks]))] = ranks


def by_sentence(problems: Mapping[int, Sequence[str]]) -> list[str]:
    """What ranks find wrong, each sentence once, after the ranks that say it."""
    ranks: dict[str, list[int]] = {}
    for rank, some in problems.items():
        for sentence in some:
            ranks.setdefault(sentence.removesuffix("."), []).append(rank)
    said: dict[tuple[int, ...], list[str]] = {}
    for sentence, who in ranks.items():
        said.setdefault(tuple(who), []).append(sentence)
    return [f"{of_ranks(who)}: {'; '.join(sentences)}" for who, sentences in said.items()]


def _do(ranks: Sequence[int]) -> str:
    return "does" if len(ranks) == 1 else "do"


def _differences(name: str, source: Layout | None, target: Layout | None) -> Iterable[str]:
    if source is None or target is None:
        has, lacks = SIDES if target is None else SIDES[::-1]
        return [f"the {has} has {name!r}, and the {lacks} doesn't"]
    if source.regions.shape != target.regions.shape:
        return [f"{name!r} has shape {source.regions.shape} in the source and {target.regions.shape} in the target"]
    if source.dtype != target.dtype and not CASTS.issuperset((source.dtype, target.dtype)):
        return [
            f"{name!r} is {source.dtype} in the source and {target.dtype} in the target; only types among "
            f"{', '.join(sorted(CASTS))} are cast: convert it before"
        ]
    if source.device != target.device:
        return [f"{name!r} is on {source.device} in the source and on {target.device} in the target"]
    if target.regions.pending:
        return [f"the target {name!r} has a pending reduction ({target.regions}), which nothing can be written into"]
    return []


def _stop(problems: list[str]) -> None:
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError(f"The source and the target of a transfer don't fit: {'; '.join(problems[:SHOWN])}{more}.")
