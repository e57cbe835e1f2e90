"""Parses what people type on a command line: placements, meshes, shapes, names of axes.

It imports no torch, so that mistakes are reported at once. Its placements stand for those of torch.
"""

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
    """All ranks along the axis hold the same."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis cuts tensor dim `dim` into chunks, one for each coordinate."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """The axis cuts tensor dim `dim` after later axes of the mesh have cut it into `split_factor` chunks."""

    dim: int
    split_factor: int


@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank along the axis holds a term, and the value is the reduction `op` of the terms."""

    op: str = "sum"


Placement = Replicate | Shard | StridedShard | Partial
# The regions before and after, and "". Or None twice, and the reason why nothing is planned.
RegionsOrReason = tuple[Regions | None, Regions | None, str]


class Mesh(NamedTuple):
    """A mesh that somebody typed.

    Attributes:
        ranks: in row-major order over the axes.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]


_WORD = re.compile(r"(R)|S(\d+)|_S(\d+)\((\d+)\)|P(?:\((\w+)\))?")
_KNOWN = f"R, S0, S1, ..., P (a sum), P({'), P('.join(list(OPS)[1:])}), or _S0(2), strided with a split factor of 2"
# Between sizes: a comma, or an x after a number, so that an axis may be called x: dp=2 x x=4.
_TIMES = re.compile(r"(?<=\d)\s*[x×*]\s*(?=\S)")


def parse_placements(text: str, axes: int, ndim: int | None = None) -> tuple[Placement, ...]:
    """Read placements: words with commas between them, one for each axis of the mesh.

    >>> parse_placements("P(max),_S0(2),R", 3)
    (Partial(op='max'), StridedShard(dim=0, split_factor=2), Replicate())
    """
    typed = tuple([_placement(word.strip(), text) for word in text.split(",")])
    if len(typed) != axes:
        raise ValueError(f"a mesh of {axes} axes needs {axes} placements, one an axis, got {len(typed)}: {text!r}")
    for axis, placement in enumerate(typed):
        if ndim is not None and isinstance(placement, (Shard, StridedShard)) and placement.dim >= ndim:
            raise ValueError(f"axis {axis} shards dim {placement.dim} of a tensor with {ndim} dims")
    return typed


def regions(placements: Sequence[Placement], shape: tuple[int, ...], sizes: tuple[int, ...]) -> Regions:
    """The regions of a tensor with these placements on a mesh of these sizes. Raises as `Regions.of`."""
    return Regions.of(
        dims=[p.dim if isinstance(p, (Shard, StridedShard)) else None for p in placements],
        ops=[p.op if isinstance(p, Partial) else None for p in placements],
        shape=shape,
        sizes=sizes,
        factors=[p.split_factor if isinstance(p, StridedShard) else 1 for p in placements],
    )


def regions_of_ends(
    ends: Sequence[Sequence[Placement]], shape: tuple[int, ...], sizes: tuple[int, ...]
) -> RegionsOrReason:
    """Return the regions before and after, and ""; (None, None, the reason) if the planner has none."""
    try:
        before, after = (regions(end, shape, sizes) for end in ends)
    except NotPlanned as reason:
        return None, None, str(reason)
    return before, after, ""


def _bare(text: str) -> str:
    """The text without the brackets around it, if there are any, and without blanks around these."""
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


def parse_integers(text: str, what: str, least: int = 1) -> tuple[int, ...]:
    """Read whole numbers with commas or an x between them, perhaps in brackets. An empty text gives none.

    >>> parse_integers("2,4", "the sizes of the mesh"), parse_integers("2x4", ""), parse_integers("(2, 4)", "")
    ((2, 4), (2, 4), (2, 4))
    """
    try:
        numbers = tuple([int(word) for word in _sizes(_bare(text)) if word])
    except ValueError:
        raise ValueError(f"{what}: needed whole numbers, as 2,4 or 2x4, got {text!r}") from None
    if any(number < least for number in numbers):
        raise ValueError(f"{what}: needed numbers of at least {least}, got {text!r}")
    return numbers


def parse_ranks(text: str | None, count: int, what: str) -> tuple[int, ...]:
    """Read ranks, each different. Without a text, 0, 1, 2, ...

    >>> parse_ranks("4-6,0", 4, "--ranks")
    (4, 5, 6, 0)
    """
    if text is None:
        return tuple(range(count))
    listed: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", word)
        if match is None:
            raise ValueError(f"{what}: needed ranks, as 0-3 or 4,5,6,7, got {text!r}")
        listed += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(listed) != count or len(set(listed)) != count:
        raise ValueError(f"{what}: the mesh needs {count} different ranks, got {text!r}")
    return tuple(listed)


def _sizes(text: str) -> list[str]:
    """The words of a text between commas, or if it has none between an x. Their blanks are cut off."""
    return [word.strip() for word in (text.split(",") if "," in text else _TIMES.split(text))]


def parse_names(text: str | None, count: int) -> tuple[str, ...]:
    """Read the names of the axes. Without a text, a, b, c, ...

    >>> parse_names(None, 3)
    ('a', 'b', 'c')
    """
    if text is None:
        return tuple(chr(ord("a") + axis) if axis < 26 else f"a{axis}" for axis in range(count))
    words = tuple(word.strip() for word in text.split(","))
    if len(words) != count or len(set(words)) != count or "" in words:
        raise ValueError(f"a mesh of {count} axes needs {count} different names, got {text!r}")
    return words


def parse_axes(text: str, known: Sequence[str], what: str) -> tuple[int, ...]:
    """Read axes, by name or by number. Returns their numbers.

    >>> parse_axes("tp,0", ["dp", "tp"], "--permute")
    (1, 0)
    """
    axes = []
    for word in text.split(","):
        word = word.strip()
        # A name first: somebody may have called an axis "0".
        axis = known.index(word) if word in known else int(word) if word.isdigit() else -1
        if not 0 <= axis < len(known):
            raise ValueError(f"{what}: the mesh has no axis {word!r}; its axes are {', '.join(known)}")
        axes.append(axis)
    if len(set(axes)) != len(axes):
        raise ValueError(f"{what} names an axis twice: {text!r}")
    return tuple(axes)


def parse_mesh(text: str, axes: str | None, permuted: str | None) -> Mesh:
    """Read a mesh from ``--mesh``, ``--axes`` and ``--permute``.

    >>> parse_mesh("2x4", "dp,tp", "tp,dp") == parse_mesh("dp=2,tp=4", None, "1,0")
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
    sizes = parse_integers(text, "--mesh, the sizes of its axes")
    if not sizes:
        raise ValueError("--mesh needs the size of at least one axis, as 2,4")
    axis_names = parse_names(axes, len(sizes))
    order = parse_axes(permuted, axis_names, "--permute") if permuted else None
    return Mesh(sizes, axis_names, ranks_in_order(sizes, order))


def ranks_in_order(sizes: tuple[int, ...], order: tuple[int, ...] | None) -> tuple[int, ...]:
    """The ranks of a mesh, row-major over its axes, if ranks are numbered along the axes in this order, slowest first.

    >>> ranks_in_order((2, 3), (1, 0))  # the first axis varies fastest, so rank 1 is at coordinate (1, 0)
    (0, 2, 4, 1, 3, 5)
    """
    order = tuple(range(len(sizes))) if order is None else order
    if sorted(order) != list(range(len(sizes))):
        raise ValueError(f"an order of {len(sizes)} axes names each of them once, got {order}")
    strides = dict(zip(order, row_major([sizes[axis] for axis in order])))
    ranks = [0]
    for axis, size in enumerate(sizes):
        ranks = [rank + step * strides[axis] for rank in ranks for step in range(size)]
    return tuple(ranks)


def parse_degrees(text: str, ranks: int | None) -> ParallelDims:
    """Read degrees of parallelism, ``pp=2,dp_shard=4,tp=2,ep=4``, and fit them to a world.

    >>> parse_degrees("dp_shard=4,tp=2,ep=4", None)
    ParallelDims(pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=4, etp=1)
    """
    known = tuple([degree.name for degree in fields(ParallelDims)])
    values: dict[str, int] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if name not in known or not equals:
            raise ValueError(f"--degrees: needed degrees as pp=2,tp=4, out of {', '.join(known)}; got {word.strip()!r}")
        if name in values:
            raise ValueError(f"--degrees names {name} twice: {text!r}")
        try:
            values[name] = int(value)
        except ValueError:
            raise ValueError(f"--degrees: {name} needs a number of ranks, got {value!r}") from None
    if ranks is not None:
        return ParallelDims(**values).fit(ranks)
    # dp_shard is -1 by default, which has no value without the size of the world.
    dims = ParallelDims(**{"dp_shard": 1, **values})
    outer = [getattr(dims, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
    if -1 in outer:
        raise ValueError(f"--degrees: what -1 stands for is known with --ranks, how many ranks there are; got {text!r}")
    return dims.fit(math.prod(outer))
