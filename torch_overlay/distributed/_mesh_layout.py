"""The algebra of mesh bookkeeping: layouts, which map coordinates to indices.

A :class:`_FlatLayout` is one axis of a mesh: a function from ``0 .. numel-1`` to
indices, given by sizes and strides with the last size varying fastest (the order of a
row-major tensor). A :class:`_MeshLayout` is a tuple of them, one an axis. Slicing,
flattening, unflattening, concatenating and permuting a mesh are all functions from
layouts to layouts; none of them depends on how many ranks the world has.

The notation and the laws are CuTe's (NVIDIA CUTLASS, "CuTe layout algebra"), in
row-major order. Everything here is plain Python integers: this file imports the
standard library only.

Classes and members have the names that torch's have in its `_mesh_layout`, and mean the
same. Upstream, only the members that torch's classes lack go in, as text that reads the
same in both: `patches/mesh-layouts.md` names them.
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
    """Drop sizes of 1 and merge neighbours that step as one. Law: the function stays
    the same."""
    kept: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if kept and kept[-1][1] == size * stride:
            kept[-1] = (kept[-1][0] * size, stride)
        else:
            kept.append((size, stride))
    return tuple(size for size, _ in kept), tuple(stride for _, stride in kept)


def _orthogonal(shape: Ints, stride: Ints) -> bool:
    """Whether each stride is a multiple of what the modes with smaller strides span,
    and none is 0."""
    span = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if step == 0 or step % span:
            return False
        span = step * size
    return True


@dataclass(frozen=True, slots=True, init=False)
class _FlatLayout:
    """One axis: sizes and strides, canonical at birth, so that equal functions are
    equal values.

    Args:
        shape: how many steps each mode takes, at least 1 each.
        stride: how far each step goes, in indices, at least 0 each; row-major if not
            given.

    Raises:
        ValueError: a size below 1, a stride below 0, or different numbers of them.

    >>> _FlatLayout((2, 4), (4, 1)) == _FlatLayout((8,))  # two spellings, one key
    True
    """

    shape: Ints
    stride: Ints
    # None: not asked yet
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
        """How many coordinates the axis has."""
        return math.prod(self.shape)

    def __call__(self, coordinate: int) -> int:
        """The index at a coordinate in ``0 .. numel-1``; raises ValueError outside."""
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
        """The coordinate that ``index`` has on this axis.

        What other axes, orthogonal to this one, add to the index doesn't change it:
        ``_FlatLayout((4,), (2,)).coordinate(6 + 1)`` is 3, as for index 6.

        Law: ``L.coordinate(L(c) + M(d)) == c`` for orthogonal ``L``, ``M`` that
        together are orthogonal.

        Raises:
            ValueError: this layout isn't orthogonal or has a stride of 0, so its digits
                can't be read off an index; or the index is below 0, where no copy of it
                is.
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
            coordinate = coordinate * size + index // stride % size
        return coordinate

    def all_ranks_from_zero(self) -> list[int]:
        """Every index, in the order of the coordinates: ``[L(c) for c in
        range(L.numel)]``."""
        found = [0]
        for size, stride in zip(self.shape, self.stride, strict=True):
            found = [index + step * stride for index in found for step in range(size)]
        return found

    def ascending(self) -> _FlatLayout:
        """The same indices from the lowest to the highest: the set, apart from its
        order.

        Raises:
            ValueError: this layout isn't orthogonal, so no order of its modes need sort
                its indices.
        """
        if not self.check_orthogonal() or 0 in self.stride:
            raise ValueError(
                f"only an orthogonal layout can be sorted by its modes, got {self}"
            )
        modes = sorted(zip(self.stride, self.shape, strict=True), reverse=True)
        return _FlatLayout(
            tuple(size for _, size in modes), tuple(stride for stride, _ in modes)
        )

    def check_sorted(self) -> bool:
        """Whether the strides descend; the indices of an orthogonal layout then
        ascend."""
        return all(outer >= inner for outer, inner in itertools.pairwise(self.stride))

    def check_orthogonal(self) -> bool:
        """Whether each index is passed at most once and any index can be read back
        digit by digit."""
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

        Raises:
            ValueError: ``layout`` leaves this layout's domain, cuts a mode where it
                doesn't divide, or has an axis whose modes together carry from one mode
                of this layout into the next.
        """
        return _MeshLayout(
            tuple(self._compose_axis(axis, layout) for axis in layout.axes)
        )

    def _compose_axis(self, axis: _FlatLayout, layout: _MeshLayout) -> _FlatLayout:
        modes: list[tuple[int, int]] = []
        # on each mode of ours, the digit of the axis's last coordinate
        largest = [0] * len(self.shape)
        for size, stride in zip(axis.shape, axis.stride, strict=True):
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
        """One mode ``c -> self(c * stride)``, ``c < size``, outermost first: (mode of
        ours, steps on it, how long)."""
        modes: list[tuple[int, int, int]] = []
        for mode in reversed(range(len(self.shape))):
            mine = self.shape[mode]
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
                step = self.stride[mode]
                raise ValueError(
                    f"{self} can't be composed with {layout}: {size}:{stride} doesn't "
                    f"divide {mine}:{step}"
                )
        if size > 1:
            raise ValueError(
                f"{self} can't be composed with {layout}: it reaches beyond "
                f"{self.numel()} coordinates"
            )
        return modes[::-1]

    def complement(self, world_size: int) -> _FlatLayout:
        """What this layout leaves out of ``0 .. world_size-1``. Law: the sums of the
        two cover each index once.

        >>> _FlatLayout((4,)).complement(8)  # starts of {0..3}, {4..7}
        _FlatLayout(2:4)

        Raises:
            ValueError: this layout isn't orthogonal, or ``world_size`` isn't a multiple
                of what it spans.
        """
        if not self.check_orthogonal():
            raise ValueError(
                f"only an orthogonal layout has a complement, got {self} and "
                f"{world_size} indices"
            )
        gaps: list[tuple[int, int]] = []
        covered = 1
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
    """The axes of a mesh, one :class:`_FlatLayout` each: from a tuple of coordinates to
    an index.

    >>> mesh = _MeshLayout.from_sizes_strides((2, 4))
    >>> mesh.coordinate(6)  # rank 6 of eight sits in the second row, third column
    (1, 2)
    """

    axes: tuple[_FlatLayout, ...]
    # None: not asked yet
    _collapsed: _FlatLayout | None = field(
        default=None, init=False, repr=False, compare=False
    )

    @classmethod
    def from_sizes_strides(
        cls, sizes: Ints, strides: Ints | None = None
    ) -> _MeshLayout:
        """A mesh of these sizes, row-major if no strides are given. Raises ValueError
        for a size below 1."""
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
        """How many coordinates the mesh has."""
        return math.prod(axis.numel() for axis in self.axes)

    def cosize(self) -> int:
        """One more than the largest index that the mesh reaches."""
        flat = self.collapse()
        return 1 + sum(
            (size - 1) * stride
            for size, stride in zip(flat.shape, flat.stride, strict=True)
        )

    def collapse(self) -> _FlatLayout:
        """All axes as one, outermost first: what flattening gives; orthogonal exactly
        if the axes together are."""
        if self._collapsed is None:
            sizes = itertools.chain.from_iterable(axis.shape for axis in self.axes)
            strides = itertools.chain.from_iterable(axis.stride for axis in self.axes)
            object.__setattr__(
                self, "_collapsed", _FlatLayout(tuple(sizes), tuple(strides))
            )
        return self._collapsed  # type: ignore[return-value]

    def coordinate(self, index: int) -> tuple[int, ...]:
        """The coordinates that ``index`` has on these axes. What axes outside the mesh
        add to it doesn't change them.

        Raises:
            ValueError: the axes aren't orthogonal together, so an index doesn't say
                where it came from.
        """
        if not self.collapse().check_orthogonal():
            raise ValueError(
                f"only orthogonal axes have coordinates for an index, got {self} and "
                f"index {index}"
            )
        return tuple(axis.coordinate(index) for axis in self.axes)

    def origin(self, index: int) -> int:
        """``index`` with every coordinate of this mesh set to 0: where the copy of the
        mesh that holds it starts.

        Raises:
            ValueError: as for `coordinate`.
        """
        if not self.collapse().check_orthogonal():
            raise ValueError(
                f"only orthogonal axes have an origin for an index, got {self} and "
                f"index {index}"
            )
        return index - sum(axis(axis.coordinate(index)) for axis in self.axes)

    def splice(self, start: int, end: int, layout: _MeshLayout) -> _MeshLayout:
        """The axes ``start .. end-1`` replaced by ``layout``. Law: the rest keeps its
        place and its strides."""
        return _MeshLayout((*self.axes[:start], *layout.axes, *self.axes[end:]))

    def select(self, axes: Sequence[int]) -> _MeshLayout:
        """The axes at these positions, in this order: a slice, or a permutation when
        all are named.

        Raises:
            ValueError: an axis named twice.
        """
        if len({*axes}) != len(axes):
            raise ValueError(
                f"a layout is selected from each axis at most once, got {tuple(axes)} "
                f"of {self}"
            )
        return _MeshLayout(tuple(self.axes[axis] for axis in axes))
