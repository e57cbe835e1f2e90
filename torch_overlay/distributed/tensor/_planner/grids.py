"""Grids: where all members' pieces are alike, packing and unpacking is one reshape, one permute and one copy.

For example, on three ranks an all-to-all takes (6, 12) elements from Shard(0) to Shard(1). A rank has (2, 12), of
which each gets (2, 4): view it as (2, 3, 4), which is rows, members and columns, and permute by (1, 0, 2): the members
come first. What arrives is (3, 2, 4): members, rows and columns, and the first two together are the six rows of the new
local tensor.

A grid puts the same on the wire as a step's list of pieces does in one round, with the members in their order. So a
runner whose group has this order, too, asks for the grid first, and copies piece by piece where there is none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .steps import AllGather, AllToAll, ReduceScatter

if TYPE_CHECKING:
    from .boxes import Box

Orders = Sequence[tuple[int, ...]]


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
    """From the local tensor to what goes to the members, one after the other; and from what came from them to the new
    local tensor. Both are None where the members' pieces aren't alike.

    An all-gather sends its local tensor as it is, and a reduce-scatter receives its result so: that one is None, too.

    Args:
        held, wanted: this rank's boxes before the step and after it.
    """
    if isinstance(step, AllToAll) and step.op is not None:
        return None, None  # what arrives is reduced
    cuts, sizes = _gone_and_new(step), step.before.sizes
    if cuts is None:
        return None, None
    gone, new = cuts
    # `wire` has the lengths of what is sent or received, in this order: the members by axis, then the dims of a piece.
    # Its keys are the axis, or ~dim for a dim. In the example above: {0: 3, ~0: 2, ~1: 4}.
    wire = {axis: sizes[axis] for axis in step.axes}
    for dim, (length, wanted_length) in enumerate(zip(held.length, wanted.length)):
        # The new axes cut what is held into pieces, and of pieces along those that are gone is made what is wanted. On
        # one dim there are only axes of one kind, or none, so that both ways a piece is as long.
        sent, received = _parts(new[dim], sizes), _parts(gone[dim], sizes)
        if length % sent or wanted_length % received:
            return None, None  # uneven shards
        wire[~dim] = length // sent
    if not isinstance(step, AllToAll) and math.prod([wire[~dim] for dim in range(len(gone))]) != step.chunk:
        return None, None  # there is padding
    return (
        None if isinstance(step, AllGather) else _to_pack(wire, new),
        None if isinstance(step, ReduceScatter) else _to_unpack(wire, gone),
    )


def _parts(axes: Iterable[int], sizes: Sequence[int]) -> int:
    return math.prod([sizes[axis] for axis in axes])


def _gone_and_new(step: AllGather | ReduceScatter | AllToAll) -> tuple[Orders, Orders] | None:
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
    if not isinstance(step, ReduceScatter) and not all_gone.issuperset(step.axes):
        return None  # not all members have pieces for each other
    if not (all_gone | all_new).issubset(step.axes):
        return None  # a cut comes or goes by an axis of another group
    return gone, new


def _to_pack(wire: Mapping[int, int], new: Orders) -> Grid:
    """From the local tensor, where each dim comes after the axes that cut it, to the members' pieces. In the example
    above it has rows, members and columns:

    >>> _to_pack({0: 3, ~0: 2, ~1: 4}, new=((), (0,)))
    Grid(lengths=(2, 3, 4), expanded=(2, 3, 4), order=(1, 0, 2))

    On a 2 x 2 mesh (8, 8) elements go from Shard(0), Shard(0) to Replicate(), Shard(1). The first axis doesn't cut the
    target, so both members along it get the same: the grid repeats each piece before it is packed.

    >>> _to_pack({0: 2, 1: 2, ~0: 2, ~1: 4}, new=((), (1,)))
    Grid(lengths=(1, 2, 2, 4), expanded=(2, 2, 2, 4), order=(0, 2, 1, 3))
    """
    cut = _labels(new)
    repeated = [label for label in wire if label not in cut]
    labels = [*repeated, *cut]
    expanded = tuple([wire[label] for label in labels])
    lengths = (*[1] * len(repeated), *expanded[len(repeated) :])
    return Grid(lengths, expanded, tuple([labels.index(label) for label in wire]))


def _to_unpack(wire: Mapping[int, int], gone: Orders) -> Grid:
    """From the members' pieces to the new local tensor, where each dim comes after the axes that cut it. In the example
    above, members, rows and columns stay in this order:

    >>> _to_unpack({0: 3, ~0: 2, ~1: 4}, gone=((0,), ()))
    Grid(lengths=(3, 2, 4), expanded=(3, 2, 4), order=(0, 1, 2))
    """
    lengths, labels = tuple(wire.values()), [*wire]
    return Grid(lengths, lengths, tuple([labels.index(label) for label in _labels(gone)]))


def _labels(cuts: Orders) -> list[int]:
    """Each dim after the axes that cut it."""
    return [label for dim, axes in enumerate(cuts) for label in (*axes, ~dim)]
