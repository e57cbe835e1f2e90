"""The arithmetic of meshes: layouts, which map coordinates to indices.

A :class:`_FlatLayout` is one axis of a mesh: a function from ``0 .. numel-1`` to
indices. Sizes and strides define it, and the last size varies fastest, as in a
row-major tensor. A :class:`_MeshLayout` is a tuple of them, one for each axis. Start at
their docstrings. Slicing, flattening, unflattening, concatenating and permuting a mesh
are functions from layouts to layouts, and none of them depends on the size of the
world.

Notation and laws are CuTe's (NVIDIA CUTLASS, "CuTe layout algebra"), in row-major
order. All values are plain Python ints, and this file imports the standard library
only.

Classes and members have the names and the meaning that they have in the upstream file
of this name. Only the members that upstream lacks are added there:
`patches/mesh-values.md` lists them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Ints = tuple[int, ...]


def row_major(sizes: Sequence[int]) -> Ints:
    """The strides, in elements, of a dense row-major box.

    >>> row_major((2, 3, 4))  # a step on the first axis skips 3 * 4
    (12, 4, 1)
    """
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _coalesce(sizes: Sequence[int], strides: Sequence[int]) -> tuple[Ints, Ints]:
    """Drop sizes of 1, and merge neighbours that step as one. Law: the same
    function."""
    kept: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        # (2, 4):(4, 1) and 8:1 are one function, and only one spelling of it may exist.
        if kept and kept[-1][1] == size * stride:
            kept[-1] = (kept[-1][0] * size, stride)
        else:
            kept.append((size, stride))
    return tuple(size for size, _ in kept), tuple(stride for _, stride in kept)


def _orthogonal(shape: Ints, stride: Ints) -> bool:
    """True if no stride is 0 and each is a multiple of what the modes with smaller
    strides span: the digits of an index can be read back."""
    span = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if step == 0 or step % span:
            return False
        span = step * size
    return True


@dataclass(frozen=True, slots=True, init=False)
class _FlatLayout:
    """One axis, as sizes and strides. It is brought into canonical form at
    construction, so that equal functions are equal values.

    Args:
        shape: the number of steps of each mode, at least 1.
        stride: the length of a step of each mode in indices, at least 0; row-major if
            not given.

    Raises:
        ValueError: a size is below 1, a stride is below 0, or there isn't one stride
            for each size.

    >>> _FlatLayout((2, 4), (4, 1)) == _FlatLayout((8,))  # two spellings, one key
    True
    """

    shape: Ints
    stride: Ints
    # Computed on the first request; None until then.
    _is_orthogonal: bool | None = field(init=False, repr=False, compare=False)

    def __init__(self, shape: Ints, stride: Ints | None = None) -> None:
        stride = row_major(shape) if stride is None else stride
        if len(shape) != len(stride):
            raise ValueError(
                f"a layout needs one stride a size, got sizes {shape} and strides "
                f"{stride}"
            )
        if shape and (min(shape) < 1 or min(stride) < 0):
            raise ValueError(
                f"a layout needs sizes >= 1 and strides >= 0, got sizes {shape} and "
                f"strides {stride}"
            )
        shape, stride = _coalesce(shape, stride)
        # The class is frozen, so plain assignment raises.
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "stride", stride)
        object.__setattr__(
            self, "_is_orthogonal", stride != (0,) if len(stride) < 2 else None
        )

    def __str__(self) -> str:
        modes = [
            f"{size}:{stride}"
            for size, stride in zip(self.shape, self.stride, strict=True)
        ]
        return "x".join(modes) or "1:0"

    def __repr__(self) -> str:
        return f"_FlatLayout({self})"

    def numel(self) -> int:
        """The number of coordinates of the axis."""
        return math.prod(self.shape)

    def __call__(self, coordinate: int) -> int:
        """The index at a coordinate."""
        if not 0 <= coordinate < self.numel():
            raise ValueError(
                f"{self} takes coordinates 0 to {self.numel() - 1}, got {coordinate}"
            )
        index = 0
        for size, stride in zip(
            reversed(self.shape), reversed(self.stride), strict=True
        ):
            coordinate, digit = divmod(coordinate, size)
            index += digit * stride
        return index

    def coordinate(self, index: int) -> int:
        """The coordinate of ``index`` on this axis.

        Contributions of other axes, which are orthogonal to this one, don't change it:
        ``_FlatLayout((4,), (2,)).coordinate(6 + 1)`` is 3, as for index 6.

        Law: ``L.coordinate(L(c) + M(d)) == c`` if ``L`` and ``M`` together are
        orthogonal.
        """
        if not self.check_orthogonal() or 0 in self.stride:
            raise ValueError(
                f"only an orthogonal layout has a coordinate for an index, got {self} "
                f"and index {index}"
            )
        if index < 0:
            raise ValueError(
                f"a copy of {self} holds indices from 0 on, got index {index}"
            )
        coordinate = 0
        for size, stride in zip(self.shape, self.stride, strict=True):
            # The digit of this mode: // drops what smaller strides add, % what larger
            # ones add.
            coordinate = coordinate * size + index // stride % size
        return coordinate

    def all_ranks_from_zero(self) -> list[int]:
        """Every index, by coordinate: ``[L(c) for c in range(L.numel())]``."""
        indices = [0]
        for size, stride in zip(self.shape, self.stride, strict=True):
            indices = [
                index + step * stride for index in indices for step in range(size)
            ]
        return indices

    def ascending(self) -> _FlatLayout:
        """The same indices in ascending order, alike for axes over the same indices."""
        if not self.check_orthogonal() or 0 in self.stride:
            raise ValueError(
                f"only an orthogonal layout can be sorted by its modes, got {self}"
            )
        modes = sorted(zip(self.stride, self.shape, strict=True), reverse=True)
        return _FlatLayout(
            tuple(size for _, size in modes), tuple(stride for stride, _ in modes)
        )

    def check_sorted(self) -> bool:
        """True if strides don't grow: indices of an orthogonal layout then ascend."""
        return all(outer >= inner for outer, inner in itertools.pairwise(self.stride))

    def check_orthogonal(self) -> bool:
        """True if no index occurs twice and the digits of any can be read back."""
        if self._is_orthogonal is None:
            object.__setattr__(
                self, "_is_orthogonal", _orthogonal(self.shape, self.stride)
            )
        return self._is_orthogonal is True

    def composition(self, layout: _MeshLayout) -> _MeshLayout:
        """The axes that ``layout`` selects from this one. Law: ``R(c) =
        self(layout(c))``.

        >>> dp = _FlatLayout((8,), (4,))  # every fourth rank of 32
        >>> dp.composition(_MeshLayout.from_sizes_strides((2, 4)))  # unflattened
        _MeshLayout(2:16, 4:4)
        """
        return _MeshLayout(
            tuple(self._compose_axis(axis, layout) for axis in layout.axes)
        )

    def _compose_axis(self, axis: _FlatLayout, layout: _MeshLayout) -> _FlatLayout:
        modes: list[tuple[int, int]] = []
        # The largest digit that the axis reaches on each mode of this layout. Each mode
        # of the axis may stay inside on its own, and their sum still overflow into the
        # next mode.
        largest = [0] * len(self.shape)
        for size, stride in zip(axis.shape, axis.stride, strict=True):
            # An axis that repeats one index repeats it on any layout.
            if stride == 0:
                modes.append((size, 0))
                continue
            for mode, steps, by in self._compose_mode(size, stride, layout):
                modes.append((steps, by * self.stride[mode]))
                largest[mode] += (steps - 1) * by
        if len(axis.shape) > 1 and any(
            digit >= size for digit, size in zip(largest, self.shape, strict=True)
        ):
            raise ValueError(
                f"{self} can't be composed with {layout}: the modes of {axis} carry "
                "into one another"
            )
        return _FlatLayout(
            tuple(size for size, _ in modes), tuple(stride for _, stride in modes)
        )

    def _compose_mode(
        self, size: int, stride: int, layout: _MeshLayout
    ) -> list[tuple[int, int, int]]:
        """The mode ``c -> self(c * stride)`` for ``c < size``, split over the modes of
        this layout: (number of the mode, steps on it, length of a step), outermost
        first."""
        modes: list[tuple[int, int, int]] = []
        for mode in reversed(range(len(self.shape))):
            mode_size = self.shape[mode]
            if size == 1:
                break
            # From the innermost mode on: all steps fit into this mode, or each step
            # skips the whole mode, or the steps fill it and go on in the next one.
            if (size - 1) * stride < mode_size:
                modes.append((mode, size, stride))
                size = 1
            elif stride % mode_size == 0:
                stride //= mode_size
            elif mode_size % stride == 0 and size % (mode_size // stride) == 0:
                modes.append((mode, mode_size // stride, stride))
                size //= mode_size // stride
                stride = 1
            else:
                step = self.stride[mode]
                raise ValueError(
                    f"{self} can't be composed with {layout}: {size}:{stride} doesn't "
                    f"divide {mode_size}:{step}"
                )
        if size > 1:
            raise ValueError(
                f"{self} can't be composed with {layout}: it reaches beyond "
                f"{self.numel()} coordinates"
            )
        return modes[::-1]

    def complement(self, world_size: int) -> _FlatLayout:
        """The layout of what this one leaves out of ``0 .. world_size-1``. Law: the
        sums of an index of each cover every index once.

        >>> _FlatLayout((4,)).complement(8)  # starts of {0..3}, {4..7}
        _FlatLayout(2:4)
        """
        if not self.check_orthogonal():
            raise ValueError(
                f"only an orthogonal layout has a complement, got {self} and "
                f"{world_size} indices"
            )
        gaps: list[tuple[int, int]] = []
        covered = 1
        # By ascending stride: what lies between the indices that are covered so far and
        # the next stride is a gap, and becomes a mode of the complement.
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            gaps.append((stride // covered, covered))
            covered = stride * size
        if world_size < covered or world_size % covered:
            raise ValueError(
                f"the complement of {self} needs a multiple of {covered} indices, got "
                f"{world_size}"
            )
        gaps.append((world_size // covered, covered))
        return _FlatLayout(
            tuple(size for size, _ in reversed(gaps)),
            tuple(stride for _, stride in reversed(gaps)),
        )


@dataclass(frozen=True, slots=True)
class _MeshLayout:
    """The axes of a mesh, one :class:`_FlatLayout` each: a function from a tuple of
    coordinates to an index.

    >>> mesh = _MeshLayout.from_sizes_strides((2, 4))
    >>> mesh.coordinate(6)  # index 6 is in the second row, third column
    (1, 2)
    """

    axes: tuple[_FlatLayout, ...]
    # Computed on the first request; None until then.
    _collapsed: _FlatLayout | None = field(
        default=None, init=False, repr=False, compare=False
    )

    @classmethod
    def from_sizes_strides(
        cls, sizes: Ints, strides: Ints | None = None
    ) -> _MeshLayout:
        """The layout of a mesh with these sizes, row-major if no strides are given."""
        strides = row_major(sizes) if strides is None else strides
        return cls(
            tuple(
                _FlatLayout((size,), (stride,))
                for size, stride in zip(sizes, strides, strict=True)
            )
        )

    def __repr__(self) -> str:
        return f"_MeshLayout({', '.join(str(axis) for axis in self.axes)})"

    @property
    def top_level_sizes(self) -> Ints:
        """The size of each axis."""
        return tuple(axis.numel() for axis in self.axes)

    def numel(self) -> int:
        """The number of coordinates of the mesh."""
        return math.prod(axis.numel() for axis in self.axes)

    def cosize(self) -> int:
        """One more than the largest index of the mesh."""
        flat = self.collapse()
        # No stride is negative, so the last coordinates have the largest index.
        return 1 + sum(
            (size - 1) * stride
            for size, stride in zip(flat.shape, flat.stride, strict=True)
        )

    def collapse(self) -> _FlatLayout:
        """All axes as one, outermost first; orthogonal exactly if they together are."""
        if self._collapsed is None:
            sizes = itertools.chain.from_iterable(axis.shape for axis in self.axes)
            strides = itertools.chain.from_iterable(axis.stride for axis in self.axes)
            object.__setattr__(
                self, "_collapsed", _FlatLayout(tuple(sizes), tuple(strides))
            )
        return self._collapsed  # type: ignore[return-value]

    def coordinate(self, index: int) -> tuple[int, ...]:
        """The coordinates of ``index`` on these axes, whatever others contribute."""
        if not self.collapse().check_orthogonal():
            raise ValueError(
                f"only orthogonal axes have coordinates for an index, got {self} and "
                f"index {index}"
            )
        return tuple(axis.coordinate(index) for axis in self.axes)

    def origin(self, index: int) -> int:
        """The start of the copy of the mesh that holds ``index``."""
        if not self.collapse().check_orthogonal():
            raise ValueError(
                f"only orthogonal axes have an origin for an index, got {self} and "
                f"index {index}"
            )
        return index - sum(axis(axis.coordinate(index)) for axis in self.axes)

    def splice(self, start: int, end: int, layout: _MeshLayout) -> _MeshLayout:
        """Replace the axes ``start .. end-1``. Law: the others keep order and
        strides."""
        return _MeshLayout((*self.axes[:start], *layout.axes, *self.axes[end:]))

    def select(self, axes: Sequence[int]) -> _MeshLayout:
        """The axes at these positions, in this order: a slice or a permutation."""
        if len({*axes}) != len(axes):
            raise ValueError(
                f"a layout is selected from each axis at most once, got {tuple(axes)} "
                f"of {self}"
            )
        return _MeshLayout(tuple(self.axes[axis] for axis in axes))
