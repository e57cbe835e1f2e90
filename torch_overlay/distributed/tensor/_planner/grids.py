"""Grids: where all members' pieces are alike, packing and unpacking is one reshape, one permute and one copy.

For example, on three ranks an all-to-all takes (6, 12) elements from Shard(0) to Shard(1). A rank has (2, 12), of
which each gets (2, 4): view it as (2, 3, 4), which is rows, members and columns, and permute by (1, 0, 2): the members
come first. What arrives is (3, 2, 4): members, rows and columns, and the first two together are the six rows of the new
local tensor.

A grid says the same as a step's list of pieces, in the same order on the wire, so each rank may choose for itself; a
runner asks for the grid first and copies piece by piece where there is none (an all-to-all that reduces, uneven shards,
padding, a dim that source and target cut by different axes at the same depth, axes of the group that don't cut the
source, except in a reduce-scatter, a cut that comes or goes by an axis that isn't of the group).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .steps import AllGather, AllToAll, ReduceScatter

if TYPE_CHECKING:
    from .boxes import Box

Orders = Sequence[tuple[int, ...]]


class Grid(NamedTuple):
    """How to read one tensor as another: view it as `lengths`, expand that to `times`, permute by `order`, make it
    contiguous.

    What comes out is flat for a pack, and to be viewed as the new local tensor for an unpack. `times` differs from
    `lengths` where several members get the same.
    """

    lengths: tuple[int, ...]
    times: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def plain(self) -> bool:
        """Is it a plain view, with no copy to make? In the example above, what arrives is the new local tensor.

        >>> to_pack = Grid((2, 3, 4), (2, 3, 4), order=(1, 0, 2))
        >>> to_unpack = Grid((3, 2, 4), (3, 2, 4), order=(0, 1, 2))
        >>> to_pack.plain, to_unpack.plain
        (False, True)
        """
        moved = [i for i in self.order if self.times[i] != 1]
        return moved == sorted(moved) and self.times == self.lengths


def grids(step: AllGather | ReduceScatter | AllToAll, held: Box, wanted: Box) -> tuple[Grid | None, Grid | None]:
    """From the local tensor to what goes to the members, one after the other; and from what came from them to the new
    local tensor. The first is None for an all-gather and the second for a reduce-scatter, which have no such list; both
    are None where the pieces aren't alike.

    Args:
        held, wanted: this rank's boxes before the step and after it.
    """
    cuts, sizes = _given_and_taken(step), step.before.sizes
    if cuts is None or (isinstance(step, AllToAll) and step.op is not None):
        return None, None
    given, taken = cuts
    # `wire` has the lengths of what is sent or received, in this order: the members by axis, then the dims of a piece.
    # Its keys are the axis, or ~dim for a dim. In the example above: {0: 3, ~0: 2, ~1: 4}.
    wire = {axis: sizes[axis] for axis in step.axes}
    for dim, (old, new) in enumerate(zip(held.length, wanted.length)):
        # On each dim given or taken is empty. So a piece is old // leaving long, and that is also new // arriving.
        leaving, arriving = (math.prod([sizes[axis] for axis in axes[dim]]) for axes in (taken, given))
        if old % leaving or new % arriving:
            return None, None
        wire[~dim] = old // leaving
    if not isinstance(step, AllToAll) and math.prod([wire[~dim] for dim in range(len(given))]) != step.chunk:
        return None, None  # there is padding
    return (
        None if isinstance(step, AllGather) else _to_pack(wire, taken),
        None if isinstance(step, ReduceScatter) else _to_unpack(wire, given),
    )


def _given_and_taken(step: AllGather | ReduceScatter | AllToAll) -> tuple[Orders, Orders] | None:
    """For each dim the axes by which only the source is cut, and those by which only the target is; None where these
    cuts allow no grid."""
    given, taken = [], []
    for old, new in zip(step.before.orders, step.after.orders):
        common = min(len(old), len(new))
        if old[:common] != new[:common]:
            return None
        given.append(old[common:])
        taken.append(new[common:])
    giving, taking = ({*itertools.chain(*cuts)} for cuts in (given, taken))
    if not isinstance(step, ReduceScatter) and not giving.issuperset(step.axes):
        return None  # members hold the same, so not all of them exchange pieces
    return (given, taken) if (giving | taking).issubset(step.axes) else None


def _to_pack(wire: Mapping[int, int], taken: Orders) -> Grid:
    """From the local tensor, where each dim comes after the axes that cut it, to the members' pieces. In the example
    above it has rows, members and columns:

    >>> _to_pack({0: 3, ~0: 2, ~1: 4}, taken=((), (0,)))
    Grid(lengths=(2, 3, 4), times=(2, 3, 4), order=(1, 0, 2))

    On a 2 x 2 mesh (8, 8) elements go from Shard(0), Shard(0) to Replicate(), Shard(1). The first axis doesn't cut the
    target, so both members along it get the same: the grid repeats each piece before it is packed.

    >>> _to_pack({0: 2, 1: 2, ~0: 2, ~1: 4}, taken=((), (1,)))
    Grid(lengths=(1, 2, 2, 4), times=(2, 2, 2, 4), order=(0, 2, 1, 3))
    """
    cut = _labels(taken)
    repeated = [label for label in wire if label not in cut]
    labels = [*repeated, *cut]
    times = tuple([wire[label] for label in labels])
    return Grid((*[1] * len(repeated), *times[len(repeated) :]), times, tuple([labels.index(label) for label in wire]))


def _to_unpack(wire: Mapping[int, int], given: Orders) -> Grid:
    """From the members' pieces to the new local tensor, where each dim comes after the axes that cut it. In the example
    above, members, rows and columns stay in this order:

    >>> _to_unpack({0: 3, ~0: 2, ~1: 4}, given=((0,), ()))
    Grid(lengths=(3, 2, 4), times=(3, 2, 4), order=(0, 1, 2))
    """
    lengths, labels = tuple(wire.values()), [*wire]
    return Grid(lengths, lengths, tuple([labels.index(label) for label in _labels(given)]))


def _labels(cuts: Orders) -> list[int]:
    """Each dim after the axes that cut it."""
    return [label for dim, axes in enumerate(cuts) for label in (*axes, ~dim)]
