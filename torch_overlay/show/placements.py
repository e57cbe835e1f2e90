"""Placements as a command line names them, so that text can be read and refused before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..distributed.tensor._planner.regions import Regions


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate of the axis holds the same."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis cuts dim `dim` into chunks, in the order of its coordinates."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """The axis cuts dim `dim` after later axes of the mesh have cut it into `split_factor` chunks."""

    dim: int
    split_factor: int


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the reduction `op` over the coordinates of the axis."""

    op: str = "sum"


Placement = Replicate | Shard | StridedShard | Partial


def regions(placements: Sequence[Placement], shape: tuple[int, ...], sizes: tuple[int, ...]) -> Regions:
    """What each coordinate of a mesh holds of a tensor. Raises as `Regions.of`."""
    return Regions.of(
        dims=[p.dim if isinstance(p, (Shard, StridedShard)) else None for p in placements],
        ops=[p.op if isinstance(p, Partial) else None for p in placements],
        shape=shape,
        sizes=sizes,
        factors=[p.split_factor if isinstance(p, StridedShard) else 1 for p in placements],
    )
