"""Descriptions: what each rank says of its tensors before a transfer, put together and compared.

A rank knows the tensors that it has a part in. With pipeline stages or with two disjoint meshes no rank knows them all,
so ranks tell one another; then all of them have the same list, find the same mistakes, and raise the same error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial

from ..distributed._rank_map import of_ranks
from ..distributed.tensor._planner.regions import NotPlanned, Regions
from ..distributed.tensor._specs import read_cuts
from ._planner.sides import Ranks
from .pending import refusal
from .trees import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

SIDES = "source", "target"
SHOWN = 5  # problems in one message


class Layout(NamedTuple):
    """How a tensor lies on a mesh.

    Attributes:
        dtype: its name.
        regions: which coordinate holds what.
        ranks: of the mesh, row-major.
        device: the type of device that the mesh is for.
    """

    dtype: str
    regions: Regions
    ranks: tuple[int, ...]
    device: str

    def __str__(self) -> str:
        shape, sizes = tuple(self.regions.shape), self.regions.sizes
        return f"{self.dtype} of shape {shape}, {self.regions} on a mesh of sizes {sizes} over {of_ranks(self.ranks)}"


class Description(NamedTuple):
    """What a rank says.

    Attributes:
        source, target: its tensors, by name.
        problem: why it can't take part; None if it can.
    """

    source: dict[str, Layout]
    target: dict[str, Layout]
    problem: str | None = None


class Tensor(NamedTuple):
    """One tensor of a transfer, as all ranks agree on it."""

    name: str
    source: Layout
    target: Layout

    @property
    def sides(self) -> tuple[Layout, Layout]:
        """Its source and its target."""
        return self.source, self.target


def describe(source: Any, target: Any, names: Callable[[str], str] | Mapping[str, str] | None) -> Description:
    """Of both sides of a transfer on this rank; a problem instead of an error, so that all ranks hear of it."""
    try:
        sides = own_tensors(source, SIDES[0], names), own_tensors(target, SIDES[1])
        layouts = [_layouts(side) for side in sides]
        wrong = [misfit(n, t, some[n].regions) for side, some in zip(sides, layouts) for n, t in side.items()]
        return Description(layouts[0], layouts[1], "; ".join(filter(None, wrong)) or None)
    except (TypeError, ValueError, NotPlanned) as error:
        return Description({}, {}, str(error))


def own_tensors(
    tree: Any, side: str, names: Callable[[str], str] | Mapping[str, str] | None = None
) -> dict[str, DTensor]:
    """The DTensors of one side, by name.

    Raises:
        TypeError: there is something else; None stands for a tensor that this rank has no part in.
        ValueError: two have one name.
    """
    found: dict[str, DTensor] = {}
    for path, leaf in leaves(tree).items():
        if leaf is None:
            continue
        name = path if names is None else names(path) if callable(names) else names.get(path, path)
        if not isinstance(leaf, DTensor):
            raise TypeError(f"The {side} {name!r} is a {type(leaf).__name__}; a transfer takes DTensors.")
        if name in found:
            raise ValueError(f"Two tensors of the {side} are called {name!r}; names maps them to one name.")
        found[name] = leaf
    return found


def _layouts(tensors: Mapping[str, DTensor]) -> dict[str, Layout]:
    return {name: layout_of(name, tensor) for name, tensor in tensors.items()}


def misfit(name: str, tensor: DTensor, regions: Regions) -> str | None:
    """What is wrong, in words, if this rank holds of a tensor what its placements don't say."""
    here, held = tensor.device_mesh.get_coordinate(), tensor._local_tensor.shape
    wanted = held if here is None else regions.box(here).length
    if wanted == held:
        return None
    return f"{name!r} has shape {tuple(held)} on rank {dist.get_rank()}, where {tensor.placements} say {wanted}"


def layout_of(name: str, tensor: DTensor) -> Layout:
    """How a DTensor lies.

    Raises:
        NotPlanned: its shards are no boxes, or what is pending is no plain reduction.
    """
    spec, mesh = tensor._spec, tensor.device_mesh
    odd = [type(each).__name__ for each in spec.placements if each.is_partial() and type(each) is not Partial]
    if odd:  # its terms aren't brought together by its operation alone
        raise NotPlanned(f"{name!r} has a pending {odd[0]}. Redistribute it on its mesh first")
    shape, sizes = tuple(tensor.shape), tuple(mesh.shape)
    try:
        regions = read_cuts(spec.placements, spec.shard_order, len(shape), sizes).on(shape, sizes)
    except NotPlanned as error:
        raise NotPlanned(f"{name!r} with placements {spec.placements}: {error}") from error
    return Layout(
        str(tensor.dtype).removeprefix("torch."), regions, tuple(mesh.mesh.flatten().tolist()), mesh.device_type
    )


def agreed(said: Mapping[int, Description], gone: frozenset[int] = frozenset()) -> list[Tensor]:
    """The tensors of a transfer, from what all ranks say that aren't gone. In order of name.

    Raises:
        ValueError: something doesn't fit; names the tensors.
    """
    _stop(by_sentence({rank: [each.problem] for rank, each in sorted(said.items()) if each.problem is not None}))
    problems: list[str] = []
    sides = [_one_side(said, side, problems, gone) for side in SIDES]
    _stop(problems)
    for name in sorted({*sides[0], *sides[1]}):
        problems += _differences(name, *[side.get(name) for side in sides])
    _stop(problems)
    return [Tensor(name, sides[0][name], sides[1][name]) for name in sorted(sides[0])]


def _one_side(
    said: Mapping[int, Description], side: str, problems: list[str], gone: frozenset[int]
) -> dict[str, Layout]:
    """The layouts of one side; every rank of a mesh must have the tensor, and all must say the same of it."""
    found: dict[str, dict[Layout, list[int]]] = {}
    for rank, description in sorted(said.items()):
        for name, layout in getattr(description, side).items():
            found.setdefault(name, {}).setdefault(layout, []).append(rank)
    for name, by_layout in found.items():
        if len(by_layout) > 1:
            views = ", and ".join(f"{layout} on {of_ranks(ranks)}" for layout, ranks in by_layout.items())
            problems.append(f"the {side} {name!r} is {views}")
        known = {rank for ranks in by_layout.values() for rank in ranks}
        (layout, (rank, *_)), *_ = by_layout.items()
        missing = [other for other in layout.ranks if other not in known and other not in gone]
        if missing:
            problems.append(
                f"the {side} {name!r} of rank {rank} is {layout}, and {of_ranks(missing)} {_do(missing)}n't have it"
            )
    return {name: next(iter(by_layout)) for name, by_layout in found.items()}


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
    if source.dtype != target.dtype:
        return [f"{name!r} is {source.dtype} in the source and {target.dtype} in the target"]
    if source.device != target.device:
        return [f"{name!r} is on {source.device} in the source and on {target.device} in the target"]
    for op in sorted({source.regions.partial[axis] or "" for axis in source.regions.pending}):
        why = refusal(op, getattr(torch, source.dtype), source.device)
        if why is not None:
            return [f"the source {name!r} has a pending {op} of {source.dtype}, and {why}"]
    if target.regions.pending:
        return [f"the target {name!r} has a pending reduction ({target.regions}), which nothing can be written into"]
    return []


def _stop(problems: list[str]) -> None:
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError(f"The source and the target of a transfer don't fit: {'; '.join(problems[:SHOWN])}{more}.")


def sides_of(tensor: Tensor, known: dict[Any, Ranks]) -> tuple[Ranks, Ranks]:
    """The ranks of both meshes, made once for each mesh."""
    found = []
    for layout in (tensor.source, tensor.target):
        key = layout.ranks, layout.regions.sizes
        if key not in known:
            known[key] = Ranks.of(*key)
        found.append(known[key])
    return found[0], found[1]
