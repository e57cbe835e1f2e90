"""The algebra of mesh bookkeeping: layouts, which map coordinates to indices.

A :class:`Layout` is one axis of a mesh: a function from ``0 .. numel-1`` to indices, given by sizes and strides with
the last size varying fastest (the order of a row-major tensor). A :class:`MeshLayout` is a tuple of them, one an axis.
Slicing, flattening, unflattening, concatenating and permuting a mesh are all functions from layouts to layouts; none
of them depends on how many ranks the world has.

The notation and the laws are CuTe's (NVIDIA CUTLASS, "CuTe layout algebra"), in row-major order. Everything here is
plain Python integers: this file imports the standard library only.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Ints = tuple[int, ...]


def row_major(sizes: Sequence[int]) -> Ints:
    """The strides, in elements, of a dense row-major box.

    >>> row_major((2, 3, 4))  # the last axis is contiguous, so a step on the first skips 3 * 4
    (12, 4, 1)
    """
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _coalesce(sizes: Sequence[int], strides: Sequence[int]) -> tuple[Ints, Ints]:
    """Drop sizes of 1 and merge neighbours that step as one. Law: the function stays the same."""
    kept: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if kept and kept[-1][1] == size * stride:
            kept[-1] = (kept[-1][0] * size, stride)
        else:
            kept.append((size, stride))
    return tuple(size for size, _ in kept), tuple(stride for _, stride in kept)


def _orthogonal(axes: Iterable[Layout]) -> bool:
    """Whether each stride is a multiple of what the modes with smaller strides span, and none is 0."""
    modes: list[Ints] = []
    for axis in axes:
        if len(axis.sizes) == 1:  # nearly every axis, and four times as fast
            modes.append(axis.strides + axis.sizes)
        else:
            modes.extend(zip(axis.strides, axis.sizes, strict=True))
    modes.sort()
    span = 1
    for stride, size in modes:
        if stride == 0 or stride % span:
            return False
        span = stride * size
    return True


@dataclass(frozen=True, slots=True, init=False)
class Layout:
    """One axis: sizes and strides, canonical at birth, so that equal functions are equal values.

    Args:
        sizes: how many steps each mode takes, at least 1 each.
        strides: how far each step goes, in indices, at least 0 each; row-major if not given.

    Raises:
        ValueError: a size below 1, a stride below 0, or different numbers of them.

    >>> Layout((2, 4), (4, 1)) == Layout((8,))  # two spellings of "all eight" are one key
    True
    """

    sizes: Ints
    strides: Ints
    _is_orthogonal: bool | None = field(init=False, repr=False, compare=False)  # None: not asked yet

    def __init__(self, sizes: Iterable[int], strides: Iterable[int] | None = None) -> None:
        sizes = tuple(sizes)
        strides = row_major(sizes) if strides is None else tuple(strides)
        if len(sizes) != len(strides):
            raise ValueError(f"a layout needs one stride a size, got sizes {sizes} and strides {strides}")
        if sizes and (min(sizes) < 1 or min(strides) < 0):
            raise ValueError(f"a layout needs sizes >= 1 and strides >= 0, got sizes {sizes} and strides {strides}")
        sizes, strides = _coalesce(sizes, strides)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "strides", strides)
        object.__setattr__(self, "_is_orthogonal", strides != (0,) if len(strides) < 2 else None)

    def __str__(self) -> str:
        modes = [f"{size}:{stride}" for size, stride in zip(self.sizes, self.strides, strict=True)]
        return "x".join(modes) or "1:0"

    def __repr__(self) -> str:
        return f"Layout({self})"

    @property
    def numel(self) -> int:
        """How many coordinates the axis has."""
        return math.prod(self.sizes)

    @property
    def cosize(self) -> int:
        """One more than the largest index that the layout reaches."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    def __call__(self, coordinate: int) -> int:
        """The index at a coordinate in ``0 .. numel-1``; raises ValueError outside."""
        if not 0 <= coordinate < self.numel:
            raise ValueError(f"{self} takes coordinates 0 to {self.numel - 1}, got {coordinate}")
        index = 0
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            coordinate, digit = divmod(coordinate, size)
            index += digit * stride
        return index

    def coordinate(self, index: int) -> int:
        """The coordinate at which an orthogonal layout passes ``index``, whatever the other axes add to it.

        Law: ``L.coordinate(L(c) + M(d)) == c`` for orthogonal ``L``, ``M`` that together are orthogonal.

        Raises:
            ValueError: this layout isn't orthogonal, so its digits can't be read off an index.
        """
        if not (self._is_orthogonal or self.is_orthogonal()):
            raise ValueError(f"only an orthogonal layout has a coordinate for an index, got {self} and index {index}")
        coordinate = 0
        for size, stride in zip(self.sizes, self.strides, strict=True):
            coordinate = coordinate * size + index // stride % size
        return coordinate

    def indices(self) -> list[int]:
        """Every index, in the order of the coordinates: ``[L(c) for c in range(L.numel)]``."""
        found = [0]
        for size, stride in zip(self.sizes, self.strides, strict=True):
            found = [index + step * stride for index in found for step in range(size)]
        return found

    def ascending(self) -> Layout:
        """The same indices from the lowest to the highest: the set, apart from its order.

        Raises:
            ValueError: this layout isn't orthogonal, so no order of its modes need sort its indices.
        """
        if not (self._is_orthogonal or self.is_orthogonal()):
            raise ValueError(f"only an orthogonal layout can be sorted by its modes, got {self}")
        modes = sorted(zip(self.strides, self.sizes, strict=True), reverse=True)
        return Layout((size for _, size in modes), (stride for stride, _ in modes))

    def is_sorted(self) -> bool:
        """Whether the strides descend; the indices of an orthogonal layout then ascend."""
        return all(outer >= inner for outer, inner in itertools.pairwise(self.strides))

    def is_orthogonal(self) -> bool:
        """Whether each index is passed at most once and any index can be read back digit by digit."""
        if self._is_orthogonal is None:
            object.__setattr__(self, "_is_orthogonal", _orthogonal((self,)))
        return self._is_orthogonal is True

    def compose(self, inner: MeshLayout) -> MeshLayout:
        """The axes that ``inner`` selects from this one. Law: ``R(c) = self(inner(c))``.

        >>> dp = Layout((8,), (4,))  # every fourth rank of 32
        >>> dp.compose(MeshLayout.dense((2, 4)))  # unflattened, the outer half steps 16 ranks at once
        MeshLayout(2:16, 4:4)

        Raises:
            ValueError: ``inner`` leaves this layout's domain, cuts a mode where it doesn't divide, or has an axis whose
                modes together carry from one mode of this layout into the next.
        """
        return MeshLayout(tuple(self._compose_axis(axis, inner) for axis in inner.axes))

    def _compose_axis(self, axis: Layout, inner: MeshLayout) -> Layout:
        modes: list[tuple[int, int]] = []
        largest = [0] * len(self.sizes)  # on each mode of ours, the digit of the axis's last coordinate
        for size, stride in zip(axis.sizes, axis.strides, strict=True):
            if stride == 0:
                modes.append((size, 0))
                continue
            for mode, steps, by in self._compose_mode(size, stride, inner):
                modes.append((steps, by * self.strides[mode]))
                largest[mode] += (steps - 1) * by
        if len(axis.sizes) > 1 and any(digit >= size for digit, size in zip(largest, self.sizes, strict=True)):
            raise ValueError(f"{self} can't be composed with {inner}: the modes of {axis} carry into one another")
        return Layout((size for size, _ in modes), (stride for _, stride in modes))

    def _compose_mode(self, size: int, stride: int, inner: MeshLayout) -> list[tuple[int, int, int]]:
        """One mode ``c -> self(c * stride)``, ``c < size``, outermost first: (mode of ours, steps on it, how long)."""
        modes: list[tuple[int, int, int]] = []
        for mode in reversed(range(len(self.sizes))):
            mine = self.sizes[mode]
            if size == 1:
                break
            if (size - 1) * stride < mine:
                modes.append((mode, size, stride))
                size = 1
            elif stride % mine == 0:
                stride //= mine
            elif mine % stride == 0 and size % (mine // stride) == 0:
                modes.append((mode, mine // stride, stride))
                size //= mine // stride
                stride = 1
            else:
                step = self.strides[mode]
                raise ValueError(f"{self} can't be composed with {inner}: {size}:{stride} doesn't divide {mine}:{step}")
        if size > 1:
            raise ValueError(f"{self} can't be composed with {inner}: it reaches beyond {self.numel} coordinates")
        return modes[::-1]

    def complement(self, cosize: int) -> Layout:
        """What this layout leaves out of ``0 .. cosize-1``. Law: the sums of the two cover each index once.

        >>> Layout((4,)).complement(8)  # the starts of the groups {0..3} and {4..7}
        Layout(2:4)

        Raises:
            ValueError: this layout isn't orthogonal, or ``cosize`` isn't a multiple of what it spans.
        """
        if not (self._is_orthogonal or self.is_orthogonal()):
            raise ValueError(f"only an orthogonal layout has a complement, got {self} and {cosize} indices")
        gaps: list[tuple[int, int]] = []
        covered = 1
        for stride, size in sorted(zip(self.strides, self.sizes, strict=True)):
            gaps.append((stride // covered, covered))
            covered = stride * size
        if cosize < covered or cosize % covered:
            raise ValueError(f"the complement of {self} needs a multiple of {covered} indices, got {cosize}")
        gaps.append((cosize // covered, covered))
        return Layout((size for size, _ in reversed(gaps)), (stride for _, stride in reversed(gaps)))


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """The axes of a mesh, one :class:`Layout` each: from a tuple of coordinates to an index.

    >>> mesh = MeshLayout.dense((2, 4))
    >>> mesh.coordinate(6)  # rank 6 of eight sits in the second row, third column
    (1, 2)
    """

    axes: tuple[Layout, ...]
    _is_orthogonal: bool | None = field(default=None, init=False, repr=False, compare=False)  # None: not asked yet

    @classmethod
    def dense(cls, sizes: Sequence[int]) -> MeshLayout:
        """The row-major mesh of these sizes. Raises ValueError for a size below 1."""
        return cls(tuple(Layout((size,), (stride,)) for size, stride in zip(sizes, row_major(sizes), strict=True)))

    def __repr__(self) -> str:
        return f"MeshLayout({', '.join(str(axis) for axis in self.axes)})"

    @property
    def sizes(self) -> Ints:
        """The size of each axis."""
        return tuple(axis.numel for axis in self.axes)

    @property
    def numel(self) -> int:
        """How many coordinates the mesh has."""
        return math.prod(axis.numel for axis in self.axes)

    def joint(self) -> Layout:
        """All axes as one, outermost first: what flattening gives."""
        sizes = itertools.chain.from_iterable(axis.sizes for axis in self.axes)
        strides = itertools.chain.from_iterable(axis.strides for axis in self.axes)
        return Layout(sizes, strides)

    def is_orthogonal(self) -> bool:
        """Whether no index is passed at two coordinates and any can be read back, axis by axis, digit by digit."""
        if self._is_orthogonal is None:
            object.__setattr__(self, "_is_orthogonal", _orthogonal(self.axes))
        return self._is_orthogonal is True

    def coordinate(self, index: int) -> Ints:
        """The coordinates at which an orthogonal mesh passes ``index``, whatever is added from outside the mesh.

        Raises:
            ValueError: the axes aren't orthogonal together, so an index doesn't say where it came from.
        """
        if not self.is_orthogonal():
            raise ValueError(f"only orthogonal axes have coordinates for an index, got {self} and index {index}")
        return tuple(axis.coordinate(index) for axis in self.axes)

    def origin(self, index: int) -> int:
        """``index`` with every coordinate of this mesh set to 0: where the copy of the mesh that holds it starts.

        Raises:
            ValueError: as for `coordinate`.
        """
        if not self.is_orthogonal():
            raise ValueError(f"only orthogonal axes have an origin for an index, got {self} and index {index}")
        return index - sum(axis(axis.coordinate(index)) for axis in self.axes)

    def splice(self, start: int, end: int, new: MeshLayout) -> MeshLayout:
        """The axes ``start .. end-1`` replaced by ``new``. Law: the rest keeps its place and its strides."""
        return MeshLayout((*self.axes[:start], *new.axes, *self.axes[end:]))

    def select(self, axes: Iterable[int]) -> MeshLayout:
        """The axes at these positions, in this order: a slice, or a permutation when all are named."""
        return MeshLayout(tuple(self.axes[axis] for axis in axes))
