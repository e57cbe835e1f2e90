"""Grids: where the pieces of all members have one shape, packing and unpacking is a view, a permute and a copy.

For example, on three ranks an all-to-all takes (6, 12) elements from Shard(0) to Shard(1). A rank has (2, 12), of
which each member gets (2, 4): view it as (2, 3, 4), which is rows, members and columns, and permute by (1, 0, 2): the
members come first. What arrives is (3, 2, 4): members, rows and columns, and the first two together are the six rows
of the new local tensor.

A grid puts the same on the wire as a step's list of pieces does in one round, with the members in their order. So a
runner whose group has this order, too, asks for the grid first, and copies piece by piece where there is none, or where
there are several rounds.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from .steps import AllGather, AllToAll, ReduceScatter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .boxes import Box


class Grid(NamedTuple):
    """How to read one tensor as another: view it as `lengths`, expand that to `expanded`, permute by `order`, make it
    contiguous.

    What comes out is flat for a pack, and to be viewed as the new local tensor for an unpack. `expanded` differs from
    `lengths` where several members get the same.
    """

    lengths: tuple[int, ...]
    expanded: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def plain(self) -> bool:
        """Is it a plain view, with no copy to make? In the example above, what arrives is the new local tensor.

        >>> to_pack = Grid((2, 3, 4), (2, 3, 4), order=(1, 0, 2))
        >>> to_unpack = Grid((3, 2, 4), (3, 2, 4), order=(0, 1, 2))
        >>> to_pack.plain, to_unpack.plain
        (False, True)
        """
        moved = [i for i in self.order if self.expanded[i] != 1]
        return moved == sorted(moved) and self.expanded == self.lengths


def grids(step: AllGather | ReduceScatter | AllToAll, held: Box, wanted: Box) -> tuple[Grid | None, Grid | None]:
    """How to pack: from the local tensor to what goes to the members, one after the other. And how to unpack: from what
    came from them to the new local tensor. Both are None where there is no grid.

    An all-gather sends its local tensor as it is, so its pack is None; a reduce-scatter receives its result as it is,
    so its unpack is None.

    Args:
        held, wanted: this rank's boxes before the step and after it.
    """
    if isinstance(step, AllToAll) and step.op is not None:
        return None, None  # what arrives is reduced
    cuts = _gone_and_new(step)
    if cuts is None:
        return None, None
    gone, new = cuts
    sizes = step.before.sizes
    # `wire` has the lengths of what is sent or received, in this order: the members by axis, then the dims of a piece.
    # Its keys are the axis, or ~dim, which is negative, for a dim. In the example above: {0: 3, ~0: 2, ~1: 4}.
    wire = {axis: sizes[axis] for axis in step.axes}
    for dim, (length, wanted_length) in enumerate(zip(held.length, wanted.length)):
        # One order of a dim begins with the other, so a dim has new axes or gone axes, never both. All other axes that
        # cut it are outside the group, whose members have the same coordinates along them: all see the same lengths.
        new_parts, gone_parts = _count(new[dim], sizes), _count(gone[dim], sizes)
        if length % new_parts or wanted_length % gone_parts:
            return None, None  # uneven shards
        wire[~dim] = length // new_parts
    if not isinstance(step, AllToAll) and math.prod([wire[~dim] for dim in range(len(gone))]) != step.chunk:
        return None, None  # there is padding
    return (
        None if isinstance(step, AllGather) else _grid(wire, _keys(new), [*wire]),
        None if isinstance(step, ReduceScatter) else _grid(wire, [*wire], _keys(gone)),
    )


def _count(axes: tuple[int, ...], sizes: Sequence[int]) -> int:
    return math.prod([sizes[axis] for axis in axes])


def _gone_and_new(
    step: AllGather | ReduceScatter | AllToAll,
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]] | None:
    """For each dim the axes by which only the source is cut, and those by which only the target is; None where these
    cuts allow no grid."""
    gone, new = [], []
    for before, after in zip(step.before.orders, step.after.orders):
        common = min(len(before), len(after))
        if before[:common] != after[:common]:
            return None  # the dim was cut by another axis at the same depth
        gone.append(before[common:])
        new.append(after[common:])
    all_gone, all_new = ({*itertools.chain(*cuts)} for cuts in (gone, new))
    # What a reduce-scatter reduces over its axes isn't cut by them before.
    if not isinstance(step, ReduceScatter) and not all_gone.issuperset(step.axes):
        return None  # along an axis that doesn't cut the source, members hold the same, and only one of them sends
    if not (all_gone | all_new).issubset(step.axes):
        return None  # a cut comes or goes by an axis outside the group
    return gone, new


def _keys(cuts: Iterable[tuple[int, ...]]) -> list[int]:
    """The keys of `wire`, each dim after the axes that cut it."""
    return [key for dim, axes in enumerate(cuts) for key in (*axes, ~dim)]


def _grid(wire: Mapping[int, int], read: list[int], written: list[int]) -> Grid:
    """From a tensor that has the dims `read`, by their keys in `wire`, to one that has those `written`. In the example
    above, in the notation of einops `r (m c) -> m r c` and `m r c -> (m r) c`:

    >>> wire = {0: 3, ~0: 2, ~1: 4}
    >>> _grid(wire, read=[~0, 0, ~1], written=[0, ~0, ~1])  # pack: rows, members, columns
    Grid(lengths=(2, 3, 4), expanded=(2, 3, 4), order=(1, 0, 2))
    >>> _grid(wire, read=[0, ~0, ~1], written=[0, ~0, ~1])  # unpack
    Grid(lengths=(3, 2, 4), expanded=(3, 2, 4), order=(0, 1, 2))

    What only `written` has is repeated. On a 2 x 2 mesh (8, 8) elements go from Shard(0), Shard(0) to Replicate(),
    Shard(1): axis 0 doesn't cut the target, so both members along it get the same, as in `r (b c) -> a b r c`.

    >>> _grid({0: 2, 1: 2, ~0: 2, ~1: 4}, read=[~0, 1, ~1], written=[0, 1, ~0, ~1])
    Grid(lengths=(1, 2, 2, 4), expanded=(2, 2, 2, 4), order=(0, 2, 1, 3))
    """
    repeated = [key for key in written if key not in read]
    keys = [*repeated, *read]
    expanded = tuple([wire[key] for key in keys])
    lengths = (1,) * len(repeated) + expanded[len(repeated) :]
    return Grid(lengths, expanded, tuple([keys.index(key) for key in written]))
