"""Grids: if the pieces of all members have the same shape, packing and unpacking is a
view, a permute and a copy.

On three ranks an all-to-all takes (6, 12) elements from Shard(0) to Shard(1). A rank
holds (2, 12), of which each member gets (2, 4). View it as (2, 3, 4), which is rows,
members and columns, and permute by (1, 0, 2), so that the members come first. What
arrives is (3, 2, 4): members, rows and columns. The first two dims together are the six
rows of the new local tensor.

A grid sends the same bytes as a step's list of pieces does in one round, if the group
has its ranks in the order of the members.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from .regions import common_prefix
from .steps import AllGather, AllToAll, ReduceScatter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .boxes import Box
    from .steps import Coordinate


class Grid(NamedTuple):
    """How to reorder the elements of a tensor: view it as `lengths`, expand that to
    `expanded`, permute by `order`, make it contiguous.

    A pack flattens the result, an unpack views it as the new local tensor. `expanded`
    differs from `lengths` if several members get the same elements.
    """

    lengths: tuple[int, ...]
    expanded: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def plain(self) -> bool:
        """True if the result is a view, as what is unpacked in the example of the
        module.

        >>> to_pack = Grid((2, 3, 4), (2, 3, 4), order=(1, 0, 2))
        >>> to_unpack = Grid((3, 2, 4), (3, 2, 4), order=(0, 1, 2))
        >>> to_pack.plain, to_unpack.plain
        (False, True)
        """
        moved = [i for i in self.order if self.expanded[i] != 1]
        return moved == sorted(moved) and self.expanded == self.lengths


def grids(
    step: AllGather | ReduceScatter | AllToAll, held: Box, wanted: Box
) -> tuple[Grid | None, Grid | None]:
    """Return how to pack, from the local tensor to what goes to the members one after
    the other, and how to unpack. Both are None if there is no grid, the pack of an
    all-gather and the unpack of a reduce-scatter where nothing changes. What an
    all-to-all reduces comes with the terms first, a dim for each axis in
    `step.reduced`."""
    cuts = _gone_and_new(step)
    if cuts is None:
        return None, None
    gone, new = cuts
    sizes = step.before.sizes
    # The dims of the buffer that is sent or received, in order: the members by axis,
    # then the dims of a piece. In the example of the module: {"a0": 3, "d0": 2, "d1":
    # 4}.
    wire = {
        f"a{axis}": sizes[axis]
        for axis in (_talking(step) if isinstance(step, AllToAll) else step.axes)
    }
    for dim, (length, wanted_length) in enumerate(zip(held.length, wanted.length)):
        # A dim has new axes or gone ones, never both, so on one side the group doesn't
        # cut it. The length on that side is the same for all members, since axes
        # outside the group cut alike for them. So all members decide alike.
        longer = max(length, wanted_length)
        parts = math.prod([sizes[axis] for axis in (*gone[dim], *new[dim])])
        if longer % parts:
            return None, None  # uneven shards
        wire[f"d{dim}"] = longer // parts
    if (
        not isinstance(step, AllToAll)
        and min(held.elements, wanted.elements) != step.chunk
    ):
        return None, None  # there is padding
    terms = [f"a{axis}" for axis in step.reduced] if isinstance(step, AllToAll) else []
    return (
        None if isinstance(step, AllGather) else _grid(wire, _names(new), [*wire]),
        None
        if isinstance(step, ReduceScatter)
        else _grid(wire, [*wire], [*terms, *_names(gone)]),
    )


def talkers(step: AllToAll, coordinate: Coordinate) -> list[int]:
    """For each member, 1 if it exchanges elements with this rank by the step's grid,
    else 0."""
    talks, axes = [1], _talking(step)
    for axis in step.axes:
        size, own = step.before.sizes[axis], coordinate[axis]
        along = [1] * size if axis in axes else [int(at == own) for at in range(size)]
        talks = [one * other for one in talks for other in along]
    return talks


def _talking(step: AllToAll) -> tuple[int, ...]:
    """Return the axes, ascending, along which a rank receives from members at other
    coordinates: those that cut a dim before the step and not after it, and those that
    it reduces over. The step must have a grid."""
    gone = itertools.chain.from_iterable(
        before[len(after) :] for before, after in _orders(step)
    )
    return tuple(sorted({*gone, *step.reduced}))


def _orders(
    step: AllGather | ReduceScatter | AllToAll,
) -> zip[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the orders before and after the step, for each dim."""
    return zip(step.before.orders, step.after.orders)


def _gone_and_new(
    step: AllGather | ReduceScatter | AllToAll,
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]] | None:
    """For each dim, the axes that cut only the source, and only the target. None
    without a grid: a cut replaces another one, or members send the same or some of
    their elements."""
    if any(
        common_prefix(before, after) < min(len(before), len(after))
        for before, after in _orders(step)
    ):
        # A cut is replaced by another one, so some members exchange nothing.
        return None
    gone = [before[len(after) :] for before, after in _orders(step)]
    new = [after[len(before) :] for before, after in _orders(step)]
    # Members of an all-gather that differ on an axis whose cut stays, or that doesn't
    # cut the source, send the same elements, which a grid would put in twice.
    if isinstance(step, AllGather) and {*itertools.chain(*gone)} != {*step.axes}:
        return None
    # If an axis that doesn't talk cuts the target as well, a rank sends only some of
    # its elements.
    axes = _talking(step) if isinstance(step, AllToAll) else step.axes
    return (gone, new) if {*itertools.chain(*new)}.issubset(axes) else None


def _names(cuts: Iterable[tuple[int, ...]]) -> list[str]:
    """Return the dims' names in a grid: each dim after the axes that cut it, see
    `grids`."""
    return [
        name
        for dim, axes in enumerate(cuts)
        for name in (*[f"a{axis}" for axis in axes], f"d{dim}")
    ]


def _grid(wire: Mapping[str, int], read: list[str], written: list[str]) -> Grid:
    """Make the grid from a tensor that has the dims `read`, by their names in `wire`,
    to one that has the dims `written`. In the example of the module, to pack and to
    unpack:

    >>> wire = {"a0": 3, "d0": 2, "d1": 4}
    >>> _grid(wire, read=["d0", "a0", "d1"], written=["a0", "d0", "d1"])
    Grid(lengths=(2, 3, 4), expanded=(2, 3, 4), order=(1, 0, 2))
    >>> _grid(wire, read=["a0", "d0", "d1"], written=["a0", "d0", "d1"])
    Grid(lengths=(3, 2, 4), expanded=(3, 2, 4), order=(0, 1, 2))

    Dims that only `written` has are repeated. On a 2 x 2 mesh (8, 8) elements go from
    Shard(0), Shard(0) to Replicate(), Shard(1). Axis 0 doesn't cut the target, so both
    members along it get the same elements.

    >>> wire = {"a0": 2, "a1": 2, "d0": 2, "d1": 4}
    >>> _grid(wire, read=["d0", "a1", "d1"], written=["a0", "a1", "d0", "d1"])
    Grid(lengths=(1, 2, 2, 4), expanded=(2, 2, 2, 4), order=(0, 2, 1, 3))
    """
    repeated = [name for name in written if name not in read]
    names = [*repeated, *read]
    expanded = tuple([wire[name] for name in names])
    lengths = (1,) * len(repeated) + expanded[len(repeated) :]
    return Grid(lengths, expanded, tuple([names.index(name) for name in written]))
