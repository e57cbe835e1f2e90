"""Grids: where all members' pieces are alike, packing and unpacking is one reshape, one permute and one copy.

A grid says the same as a step's list of pieces, in the same order on the wire, so each rank may choose for itself; a
runner asks for the grid first and copies piece by piece where there is none (uneven or empty shards, cuts that part
on one dim, free axes that cut the target too). Standard library only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .steps import AllGather, AllToAll, Collective, ReduceScatter

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
        """Is it a plain view, with no copy to make?"""
        moved = [i for i in self.order if self.times[i] != 1]
        return moved == sorted(moved) and self.times == self.lengths


def grids(step: AllGather | ReduceScatter | AllToAll, held: Box, wanted: Box) -> tuple[Grid | None, Grid | None]:
    """From the local tensor to what goes to the members, one after the other; and from what came from them to the new
    local tensor. None where a step has no such list of pieces, or the pieces aren't alike.

    Args:
        held, wanted: this rank's boxes before the step and after it.
    """
    given, taken = [], []  # by dim, the cuts that only the source has, and that only the target has
    for old, new in zip(step.before.orders, step.after.orders):
        common = min(len(old), len(new))
        if old[:common] != new[:common]:
            return None, None
        given.append(old[common:])
        taken.append(new[common:])
    if isinstance(step, AllToAll) and not {*itertools.chain.from_iterable(given)}.issuperset(step.axes):
        return None, None  # not every member exchanges pieces with every other one
    if not {*itertools.chain.from_iterable(taken)} <= {*step.axes} or not _alike(step, held, wanted, given, taken):
        return None, None
    pack = _pack(step, held, taken) if not isinstance(step, AllGather) else None
    return pack, _unpack(step, wanted, given) if not isinstance(step, ReduceScatter) else None


def _alike(step: AllGather | ReduceScatter | AllToAll, held: Box, wanted: Box, given: Orders, taken: Orders) -> bool:
    """Does each member's piece have the same lengths, and no padding after it?"""
    if isinstance(step, AllToAll) and step.op is not None:
        return False
    sizes, piece = step.before.sizes, 1
    for old, new, before, after in zip(held.length, wanted.length, given, taken):
        # What is held is cut for others by the target's further cuts; what is wanted comes in the source's.
        parts = math.prod([sizes[a] for a in after]) if after else 1
        pieces = math.prod([sizes[a] for a in before]) if before else 1
        if old % parts or new % pieces or old // parts != new // pieces:
            return False
        piece *= old // parts
    return isinstance(step, AllToAll) or piece == step.chunk


def _pack(step: Collective, held: Box, taken: Orders) -> Grid:
    sizes = step.before.sizes
    # Members that differ only along an axis that doesn't cut the target want the same.
    alike = [axis for axis in step.axes if not any(axis in axes for axes in taken)]
    place = {axis: number for number, axis in enumerate(alike)}
    times = [sizes[axis] for axis in alike]
    inner = []
    for axes, length in zip(taken, held.length):
        for axis in axes:
            place[axis] = len(times)
            times.append(sizes[axis])
            length //= sizes[axis]
        inner.append(len(times))
        times.append(length)
    lengths = (*[1] * len(alike), *times[len(alike) :])
    return Grid(lengths, tuple(times), (*[place[a] for a in step.axes], *inner))


def _unpack(step: Collective, wanted: Box, given: Orders) -> Grid:
    sizes = step.before.sizes
    view = [sizes[axis] for axis in step.axes]
    order = []
    for axes, length in zip(given, wanted.length):
        for axis in axes:
            order.append(step.axes.index(axis))
            length //= sizes[axis]
        order.append(len(view))
        view.append(length)
    return Grid(tuple(view), tuple(view), tuple(order))
