"""Words: what a rank says, as data that another one reads without running anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..distributed.tensor._planner.regions import Box, Regions
from .descriptions import SIDES, Description, Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    Data = dict[str, Any]  # of text, numbers, lists and dicts, as JSON has them


def as_data(description: Description) -> Data:
    """A description; each mesh once."""
    meshes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    sides = []
    for side in (description.source, description.target):
        rows = {}
        for name, (dtype, regions, ranks, device, pieces) in side.items():
            mesh = meshes.setdefault((ranks, regions.sizes), len(meshes))
            rows[name] = [dtype, device, mesh, regions.shape, regions.orders, regions.partial, pieces]
        sides.append(rows)
    digests = description.digests or {}
    said: Data = {"meshes": [*meshes], "problem": description.problem, "digests": digests, "tied": description.tied}
    said |= {"budget": description.budget, "strict": description.strict}
    return {**said, **dict(zip(SIDES, sides))}


def from_data(data: Data) -> Description:
    """The description that was said."""
    meshes = [(tuple(ranks), tuple(sizes)) for ranks, sizes in data["meshes"]]
    sides = [{name: _layout(row, meshes) for name, row in data[side].items()} for side in SIDES]
    tied = [tuple(names) for names in data["tied"]]
    return Description(
        sides[0], sides[1], data["problem"], boxed(data["digests"]), tied, data["budget"], data["strict"]
    )


def boxed(digests: Data) -> dict[str, list[tuple[Box, str]]]:
    """Digests that were said, by box."""
    return {name: [(_box(box), seen) for box, seen in found] for name, found in digests.items()}


def all_from_data(said: Mapping[int, Data]) -> dict[int, Description]:
    """What ranks said; of those who said the same, one object."""
    made: dict[int, Description] = {}
    for data in said.values():
        if id(data) not in made:
            made[id(data)] = from_data(data)
    return {rank: made[id(data)] for rank, data in said.items()}


def _layout(row: list[Any], meshes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Layout:
    dtype, device, mesh, shape, orders, partial, pieces = row
    ranks, sizes = meshes[mesh]
    regions = Regions(tuple(shape), sizes, tuple(map(tuple, orders)), tuple(partial))
    return Layout(dtype, regions, ranks, device, tuple([tuple(map(_box, boxes)) for boxes in pieces]))


def _box(data: list[list[int]]) -> Box:
    return Box(tuple(data[0]), tuple(data[1]))
