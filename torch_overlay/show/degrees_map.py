"""All meshes of a run in one map: what degrees of parallelism give, each set of groups once. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import fields

from ..hints import did_you_mean
from ..parallel_dims import MESHES, ParallelDims
from .mesh_map import Axis, MeshMap

_DEGREES = tuple(each.name for each in fields(ParallelDims))


def parse(text: str, ranks: int | None) -> ParallelDims:
    """Degrees as they are typed, fitted to a world: ``pp=2,dp_shard=4,tp=2,ep=4``.

    Args:
        ranks: of the world; None for as many as the degrees make, where a degree that isn't named is 1.

    Raises:
        ValueError: no degrees, or such as don't fit.

    >>> parse("dp_shard=4,tp=2,ep=4", None)
    ParallelDims(pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=4, etp=1)
    """
    given: dict[str, int] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if name not in _DEGREES or not equals:
            hint = did_you_mean(name, _DEGREES) if name not in _DEGREES else ""
            raise ValueError(
                f"--degrees: needed degrees as pp=2,tp=4, out of {', '.join(_DEGREES)}; got {word.strip()!r}{hint}"
            )
        if name in given:
            raise ValueError(f"--degrees names {name} twice: {text!r}")
        try:
            given[name] = int(value)
        except ValueError:
            raise ValueError(f"--degrees: {name} needs a number of ranks, got {value!r}") from None
    if ranks is not None:
        return ParallelDims(**given).fit(ranks)
    dims = ParallelDims(**{"dp_shard": 1, **given})
    outer = [getattr(dims, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
    if -1 in outer:
        raise ValueError(f"--degrees: what -1 stands for is known with --ranks, how many ranks there are; got {text!r}")
    return dims.fit(math.prod(outer))


def of_degrees(dims: ParallelDims) -> MeshMap:
    """The axes of all meshes, those with the same groups as one.

    Args:
        dims: with every degree known, as `ParallelDims.fit` gives them.

    >>> [axis.label for axis in of_degrees(ParallelDims(tp=2).fit(4)).axes]  # without ep, all ranks shard the experts
    ['world = efsdp', 'pp = dp_replicate = ep = etp = cp', 'fsdp = batch = loss', 'tp']
    """
    sizes = dims.sizes()
    notes = [f"{mesh:8}{_spelled(names, sizes)}" for mesh, names in MESHES.items()]
    notes.append(f"{'loss':8}{_spelled(('loss',), sizes)}")
    found: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for axis in _axes(sizes):
        names = found.setdefault(axis.groups, [])
        if axis.name not in names:
            names.append(axis.name)
    axes = [Axis(names[0], groups, " = ".join(names)) for groups, names in found.items()]
    named = [f"{each.name}={getattr(dims, each.name)}" for each in fields(dims) if getattr(dims, each.name) > 1]
    return MeshMap(" ".join(named) or "one rank", tuple(range(sizes["world"])), tuple(axes), tuple(notes))


def _axes(sizes: dict[str, int]) -> list[Axis]:
    """Every axis of every mesh; loss is the axes of the data mesh that are joined, as one."""
    views = [*MESHES.values(), ("pp", "loss", "tp")]
    maps = [MeshMap.of(names, [sizes[name] for name in names], range(sizes["world"])) for names in views]
    return [axis for shown in maps for axis in shown.axes]


def _spelled(names: tuple[str, ...], sizes: dict[str, int]) -> str:
    return " x ".join(f"{name}={sizes[name]}" for name in names)
