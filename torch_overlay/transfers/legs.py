"""Legs: what a transfer plans and runs, one for each tensor, or for each two numbers of pieces of a tensor."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ._planner.pieces import Listed, OnMesh, Pieced, PieceMove
from ._planner.routes import Move
from ._planner.sides import Ranks, Side

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._planner.pieces import End
    from ._planner.schedule import AnyMove
    from .descriptions import Layout, Tensor


class Leg(NamedTuple):
    """One way of a tensor.

    Attributes:
        numbers: of the pieces of its source and of its target that belong to it; 0 where it isn't in pieces.
    """

    tensor: Tensor
    numbers: tuple[int, int]
    move: AnyMove


def legs_of(tensors: Sequence[Tensor], gone: frozenset[int]) -> list[Leg]:
    """All legs, those of a tensor together; the same on every rank.

    Raises:
        ValueError: pieces of a source, or what is left of it without the ranks that are gone, don't cover it; names
            the tensors.
    """
    known: dict[Any, Ranks] = {}
    legs, problems = [], []
    for tensor in tensors:
        if not (tensor.source.pieces or tensor.target.pieces):
            legs.append(Leg(tensor, (0, 0), _move(tensor, known)))
            continue
        pieces = _in_pieces(tensor.source, tensor.target, gone)
        missing = pieces.missing() if tensor.source.pieces else None
        if missing is not None:
            problems.append(
                f"the pieces of {tensor.name!r}, of shape {tuple(tensor.source.regions.shape)}, leave out what starts "
                f"at {missing.start} and has shape {missing.length}"
            )
        members = tensor.source.ranks + tensor.target.ranks
        for numbers in _numbers(tensor, pieces):
            legs.append(Leg(tensor, numbers, PieceMove(pieces, numbers, tensor.wire.itemsize, members)))
    if problems:
        raise ValueError(f"The source of a transfer isn't whole: {'; '.join(problems)}.")
    return legs


def _numbers(tensor: Tensor, pieces: Pieced) -> list[tuple[int, int]]:
    """Of the pieces between which something goes, or stays."""
    if not (tensor.source.pieces and tensor.target.pieces):
        return [*itertools.product(range(_most(tensor.source)), range(_most(tensor.target)))]
    return sorted({(0, 0), *pieces.pairs(zip(tensor.target.ranks, tensor.target.pieces))})


def _most(layout: Layout) -> int:
    """How many pieces some rank has."""
    return max(map(len, layout.pieces), default=1)


# Equal tensors are planned once.
@lru_cache(maxsize=256)
def _in_pieces(source: Layout, target: Layout, gone: frozenset[int]) -> Pieced:
    return Pieced(tuple(source.regions.shape), _end(source), _end(target), gone)


def _end(layout: Layout) -> End:
    if layout.pieces:
        return Listed(zip(layout.ranks, layout.pieces))
    return OnMesh(Side(layout.regions, Ranks.of(layout.ranks, layout.regions.sizes)))


def _move(tensor: Tensor, known: dict[Any, Ranks]) -> Move:
    sides = []
    for layout in tensor.sides:
        key = layout.ranks, layout.regions.sizes
        if key not in known:
            known[key] = Ranks.of(*key)
        sides.append(Side(layout.regions, known[key]))
    return Move(sides[0], sides[1], tensor.wire.itemsize)
