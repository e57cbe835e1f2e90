"""What people type: placements, meshes, shapes and names of axes, read and refused before torch is imported."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from ..distributed._mesh_layout import row_major
from ..distributed.tensor._planner.regions import OPS, NotPlanned, Regions
from ..parallel_dims import ParallelDims


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
Held = tuple[Regions | None, Regions | None, str]  # before and after, or neither, and why that isn't planned


class Mesh(NamedTuple):
    """A mesh as it is typed.

    Attributes:
        ranks: row-major over its axes.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]


_WORD = re.compile(r"(R)|S(\d+)|_S(\d+)\((\d+)\)|P(?:\((\w+)\))?")
_KNOWN = f"R, S0, S1, ..., P (a sum), P({'), P('.join(list(OPS)[1:])}), or _S0(2), strided with a split factor of 2"
# Between sizes: a comma, or an x after a number.
_TIMES = re.compile(r"(?<=\d)\s*[x×*]\s*(?=\S)")


def placements(text: str, axes: int, ndim: int | None = None) -> tuple[Placement, ...]:
    """Placements as words, one for each axis of the mesh, with commas between them.

    Args:
        ndim: of the tensor, if it is known.

    Raises:
        ValueError: a word that is no placement, too many or few of them, or a dim that the tensor lacks.

    >>> placements("P(max),_S0(2),R", 3)
    (Partial(op='max'), StridedShard(dim=0, split_factor=2), Replicate())
    """
    found = tuple([_placement(word.strip(), text) for word in text.split(",")])
    if len(found) != axes:
        raise ValueError(f"a mesh of {axes} axes needs {axes} placements, one an axis, got {len(found)}: {text!r}")
    for axis, placement in enumerate(found):
        if ndim is not None and isinstance(placement, (Shard, StridedShard)) and placement.dim >= ndim:
            raise ValueError(f"axis {axis} shards dim {placement.dim} of a tensor with {ndim} dims")
    return found


def regions(placements: Sequence[Placement], shape: tuple[int, ...], sizes: tuple[int, ...]) -> Regions:
    """What each coordinate of a mesh holds of a tensor. Raises as `Regions.of`."""
    return Regions.of(
        dims=[p.dim if isinstance(p, (Shard, StridedShard)) else None for p in placements],
        ops=[p.op if isinstance(p, Partial) else None for p in placements],
        shape=shape,
        sizes=sizes,
        factors=[p.split_factor if isinstance(p, StridedShard) else 1 for p in placements],
    )


def held(ends: Sequence[Sequence[Placement]], shape: tuple[int, ...], sizes: tuple[int, ...]) -> Held:
    """What each coordinate of a mesh holds by these placements, before and after."""
    try:
        before, after = (regions(end, shape, sizes) for end in ends)
    except NotPlanned as reason:
        return None, None, str(reason)
    return before, after, ""


def _bare(text: str) -> str:
    """Without the brackets around it."""
    bare = text.strip()
    return bare[1:-1] if bare[:1] + bare[-1:] in ("[]", "()") else bare


def _placement(word: str, text: str) -> Placement:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ValueError(f"{word!r} in {text!r} is no placement; there are {_KNOWN}")
    whole, dim, strided, factor, op = match.groups()
    if whole:
        return Replicate()
    if dim:
        return Shard(int(dim))
    if strided:
        return StridedShard(int(strided), int(factor))
    if op is not None and op not in OPS:
        raise ValueError(f"{word!r} in {text!r} is no reduction that torch knows; there are {', '.join(OPS)}")
    return Partial(op or "sum")


def integers(text: str, what: str, least: int = 1) -> tuple[int, ...]:
    """Whole numbers, with commas or an x between them.

    >>> integers("2,2,2", "the sizes of the mesh") == integers("2x2x2", "") == integers("(2, 2, 2)", "")
    True
    """
    try:
        found = tuple([int(word) for word in _sizes(_bare(text)) if word])
    except ValueError:
        raise ValueError(f"{what}: needed whole numbers, as 2,4 or 2x4, got {text!r}") from None
    if any(number < least for number in found):
        raise ValueError(f"{what}: needed numbers of at least {least}, got {text!r}")
    return found


def ranks(text: str | None, count: int, what: str) -> tuple[int, ...]:
    """So many ranks: from 0 on if none are given.

    >>> ranks("4-6,0", 4, "--ranks")
    (4, 5, 6, 0)
    """
    if text is None:
        return tuple(range(count))
    found: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", word)
        if match is None:
            raise ValueError(f"{what}: needed ranks, as 0-3 or 4,5,6,7, got {text!r}")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(found) != count or len(set(found)) != count:
        raise ValueError(f"{what}: the mesh needs {count} different ranks, got {text!r}")
    return tuple(found)


def _sizes(text: str) -> list[str]:
    return [word.strip() for word in (text.split(",") if "," in text else _TIMES.split(text))]


def names(text: str | None, count: int) -> tuple[str, ...]:
    """The names of the axes; a, b, c as they come if none are given.

    >>> names(None, 3)
    ('a', 'b', 'c')
    """
    if text is None:
        return tuple(chr(ord("a") + axis) if axis < 26 else f"a{axis}" for axis in range(count))
    found = tuple(word.strip() for word in text.split(","))
    if len(found) != count or len(set(found)) != count or "" in found:
        raise ValueError(f"a mesh of {count} axes needs {count} different names, got {text!r}")
    return found


def chosen(text: str, known: Sequence[str], what: str) -> tuple[int, ...]:
    """Which axes are meant, by name or by number.

    >>> chosen("tp,0", ["dp", "tp"], "--permute")
    (1, 0)
    """
    found = []
    for word in text.split(","):
        word = word.strip()
        axis = known.index(word) if word in known else int(word) if word.isdigit() else -1
        if not 0 <= axis < len(known):
            raise ValueError(f"{what}: the mesh has no axis {word!r}; its axes are {', '.join(known)}")
        found.append(axis)
    if len(set(found)) != len(found):
        raise ValueError(f"{what} names an axis twice: {text!r}")
    return tuple(found)


def mesh(text: str, axes: str | None, permuted: str | None) -> Mesh:
    """The mesh that ``--mesh``, its axes' names and ``--permute`` describe.

    >>> mesh("2x4", "dp,tp", "tp,dp") == mesh("dp=2,tp=4", None, "1,0")
    True
    """
    named = [word.partition("=") for word in _sizes(text)]
    if any(equals for _, equals, _ in named):
        if axes is not None:
            raise ValueError(f"--mesh {text} names its axes, so leave out --axes {axes}")
        if not all(equals for _, equals, _ in named):
            raise ValueError(f"--mesh: each axis has a name or none has, as dp=2,tp=4 or 2,4; got {text!r}")
        axes = ",".join(name.strip() for name, _, _ in named)
        text = ",".join(size.strip() for _, _, size in named)
    read = integers(text, "--mesh, the sizes of its axes")
    if not read:
        raise ValueError("--mesh needs the size of at least one axis, as 2,4")
    called = names(axes, len(read))
    return Mesh(read, called, laid_out(read, chosen(permuted, called, "--permute") if permuted else None))


def laid_out(sizes: tuple[int, ...], order: tuple[int, ...] | None) -> tuple[int, ...]:
    """The ranks of a mesh, row-major over its axes, that are numbered along the axes in this order, slowest first.

    >>> laid_out((2, 3), (1, 0))  # along the first axis first, so rank 1 is at coordinate (1, 0)
    (0, 2, 4, 1, 3, 5)

    Raises:
        ValueError: the order doesn't name each axis once.
    """
    order = tuple(range(len(sizes))) if order is None else order
    if sorted(order) != list(range(len(sizes))):
        raise ValueError(f"an order of {len(sizes)} axes names each of them once, got {order}")
    strides = dict(zip(order, row_major([sizes[axis] for axis in order])))
    ranks = [0]
    for axis, size in enumerate(sizes):
        ranks = [rank + step * strides[axis] for rank in ranks for step in range(size)]
    return tuple(ranks)


def degrees(text: str, ranks: int | None) -> ParallelDims:
    """Degrees as they are typed, fitted to a world: ``pp=2,dp_shard=4,tp=2,ep=4``.

    Args:
        ranks: of the world; None for as many as the degrees make, where a degree that isn't named is 1.

    Raises:
        ValueError: no degrees, or such as don't fit.

    >>> degrees("dp_shard=4,tp=2,ep=4", None)
    ParallelDims(pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=4, etp=1)
    """
    known = tuple([each.name for each in fields(ParallelDims)])
    given: dict[str, int] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if name not in known or not equals:
            raise ValueError(f"--degrees: needed degrees as pp=2,tp=4, out of {', '.join(known)}; got {word.strip()!r}")
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
