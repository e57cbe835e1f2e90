"""Grids: where all members' pieces are alike, packing and unpacking is one reshape, one permute and one copy.

For example, on three ranks an all-to-all takes (6, 12) elements from Shard(0) to Shard(1). A rank has (2, 12), of
which each gets (2, 4): view it as (2, 3, 4), which is rows, members and columns, and permute by (1, 0, 2): the members
come first. What arrives is (3, 2, 4): members, rows and columns, and the first two together are the six rows of the new
local tensor. The docstrings below go on with this example.

A grid says the same as a step's list of pieces, in the same order on the wire, so each rank may choose for itself; a
runner asks for the grid first and copies piece by piece where there is none (an all-to-all that reduces, uneven or
empty shards, padding, a dim that source and target cut by different axes at the same depth, axes of the group that
don't cut the source, cuts by axes that aren't of the group).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
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
        """Is it a plain view, with no copy to make?

        >>> to_pack = Grid((2, 3, 4), (2, 3, 4), order=(1, 0, 2))
        >>> to_unpack = Grid((3, 2, 4), (3, 2, 4), order=(0, 1, 2))
        >>> to_pack.plain, to_unpack.plain
        (False, True)
        """
        moved = [i for i in self.order if self.times[i] != 1]
        return moved == sorted(moved) and self.times == self.lengths


class Pattern(NamedTuple):
    """The grids of a change of cuts, but for the lengths of the pieces.

    >>> from_rows_to_columns = dict(before=((0,), ()), after=((), (0,)), sizes=(3,))
    >>> pattern = _pattern(**from_rows_to_columns, axes=(0,), exchanges=True)
    >>> pattern.parts  # rows are joined from 3 pieces, columns cut into 3
    ((1, 3), (3, 1))
    >>> pattern.taken, pattern.members, pattern.pack, pattern.unpack
    (((), (3,)), (3,), (1, 0, 2), (0, 1, 2))
    >>> piece = (2, 4)  # rows and columns
    >>> pattern.packed(piece).lengths, pattern.unpacked(piece).lengths
    ((2, 3, 4), (3, 2, 4))

    On a 2 x 2 mesh (8, 8) elements go from Shard(0), Shard(0) to Replicate(), Shard(1). The first axis doesn't cut the
    target, so both members along it get the same: the grid repeats each piece before it is packed.

    >>> before, after = ((0, 1), ()), ((), (1,))
    >>> pattern = _pattern(before, after, sizes=(2, 2), axes=(0, 1), exchanges=True)
    >>> pattern.alike, pattern.packed((2, 4))
    ((2,), Grid(lengths=(1, 2, 2, 4), times=(2, 2, 2, 4), order=(0, 2, 1, 3)))

    Attributes:
        parts: for each dim, the pieces that the source shard is cut into, and those that the target shard is joined
            from.
        alike: the sizes of the members' axes that don't cut the target: members that differ along these want the same.
        taken: for each dim, the sizes of the axes by which only the target cuts it.
        members: the sizes of the members' axes.
        pack, unpack: the orders of both grids.
    """

    parts: tuple[tuple[int, int], ...]
    alike: tuple[int, ...]
    taken: tuple[tuple[int, ...], ...]
    members: tuple[int, ...]
    pack: tuple[int, ...]
    unpack: tuple[int, ...]

    def packed(self, piece: Sequence[int]) -> Grid:
        """From the local tensor to pieces of these lengths. There each dim comes after the axes that cut it."""
        cut = [length for sizes, inner in zip(self.taken, piece) for length in (*sizes, inner)]
        return Grid((*[1] * len(self.alike), *cut), (*self.alike, *cut), self.pack)

    def unpacked(self, piece: Sequence[int]) -> Grid:
        """From pieces of these lengths to the new local tensor. What came has the members in front."""
        lengths = (*self.members, *piece)
        return Grid(lengths, lengths, self.unpack)


def grids(step: AllGather | ReduceScatter | AllToAll, held: Box, wanted: Box) -> tuple[Grid | None, Grid | None]:
    """From the local tensor to what goes to the members, one after the other; and from what came from them to the new
    local tensor. None where a step has no such list of pieces, or the pieces aren't alike.

    Args:
        held, wanted: this rank's boxes before the step and after it.
    """
    if isinstance(step, AllToAll) and step.op is not None:
        return None, None
    before, after = step.before, step.after
    pattern = _pattern(before.orders, after.orders, before.sizes, step.axes, isinstance(step, AllToAll))
    if pattern is None:
        return None, None
    piece = []
    for old, new, (parts, pieces) in zip(held.length, wanted.length, pattern.parts):
        if old % parts or new % pieces or old // parts != new // pieces:
            return None, None
        piece.append(old // parts)
    if not isinstance(step, AllToAll) and math.prod(piece) != step.chunk:
        return None, None  # there is padding
    return (
        None if isinstance(step, AllGather) else pattern.packed(piece),
        None if isinstance(step, ReduceScatter) else pattern.unpacked(piece),
    )


@lru_cache(maxsize=1024)
def _pattern(
    before: Orders, after: Orders, sizes: tuple[int, ...], axes: tuple[int, ...], exchanges: bool
) -> Pattern | None:
    given, taken = [], []  # by dim, the cuts that only the source has, and that only the target has
    for old, new in zip(before, after):
        common = min(len(old), len(new))
        if old[:common] != new[:common]:
            return None
        given.append(old[common:])
        taken.append(new[common:])
    giving, taking = ({*itertools.chain.from_iterable(cuts)} for cuts in (given, taken))
    if exchanges and not giving.issuperset(axes):
        return None  # not every member exchanges pieces with every other one
    if not (giving | taking).issubset(axes):
        return None

    def lengths(some: Iterable[int]) -> tuple[int, ...]:
        return tuple([sizes[axis] for axis in some])

    alike = [axis for axis in axes if axis not in taking]
    return Pattern(
        tuple([(math.prod(lengths(new)), math.prod(lengths(old))) for old, new in zip(given, taken)]),
        lengths(alike),
        tuple(map(lengths, taken)),
        lengths(axes),
        _pack_order(axes, alike, taken),
        _unpack_order(axes, given),
    )


def _pack_order(axes: Sequence[int], alike: Sequence[int], taken: Orders) -> tuple[int, ...]:
    """The members, then the dims of a piece; in the tensor each dim comes after the axes that cut it. Here and below an
    axis is written as its number, a dim as ~dim, so that one list says where each is.

    >>> _pack_order(axes=(0,), alike=(), taken=((), (0,)))  # of rows, members, columns
    (1, 0, 2)
    """
    have = [*alike]
    for dim, cuts in enumerate(taken):
        have += [*cuts, ~dim]
    return tuple([have.index(label) for label in (*axes, *[~dim for dim in range(len(taken))])])


def _unpack_order(axes: Sequence[int], given: Orders) -> tuple[int, ...]:
    """Each dim after the axes that cut it; what came has the members, then the dims of a piece.

    >>> _unpack_order(axes=(0,), given=((0,), ()))  # of members, rows, columns
    (0, 1, 2)
    """
    came = [*axes, *[~dim for dim in range(len(given))]]
    return tuple([came.index(label) for dim, cuts in enumerate(given) for label in (*cuts, ~dim)])
