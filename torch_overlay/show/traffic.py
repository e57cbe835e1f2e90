"""Traffic: how many elements each rank sends to each other in a step. Standard library only."""

from __future__ import annotations

import itertools

from ..distributed.tensor._planner.regions import Regions
from ..distributed.tensor._planner.steps import AllGather, AllReduce, AllToAll, Collective, ReduceScatter


def coordinates(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every coordinate of a mesh, row-major."""
    return list(itertools.product(*map(range, sizes)))


def traffic(step: Collective) -> list[list[int]]:
    """Elements from each position of the mesh (row-major) to each other one, without padding.

    An all-reduce has no fixed way; it is shown as a reduce-scatter and an all-gather of equal parts.
    """
    places = coordinates(step.before.sizes)
    number = {place: i for i, place in enumerate(places)}
    sent = [[0] * len(places) for _ in places]
    for place in places:
        members = [number[member] for member in step.members(place)]
        for member, elements in _parts(step, place):
            other = members[member]
            if other == number[place]:
                continue
            if isinstance(step, AllGather):
                sent[other][number[place]] += elements
            else:
                sent[number[place]][other] += elements
    return sent


def _parts(step: Collective, place: tuple[int, ...]) -> list[tuple[int, int]]:
    """Member and elements: of an all-gather what comes from it, else what goes to it."""
    if isinstance(step, AllReduce):
        return [(member, -(-2 * step.before.most // step.ranks)) for member in range(step.ranks)]
    if isinstance(step, AllToAll):
        return [(piece.member, piece.box.elements) for piece in step.sends(place)]
    assert isinstance(step, (AllGather, ReduceScatter)), step
    return [(piece.member, piece.box.elements) for piece in step.pieces(place)]


def holders(regions: Regions) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]]:
    """Start and length of each box that some position holds, and the positions that hold it."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for number, place in enumerate(coordinates(regions.sizes)):
        box = regions.box(place)
        if box.elements:
            found.setdefault((box.start, box.length), []).append(number)
    return found
