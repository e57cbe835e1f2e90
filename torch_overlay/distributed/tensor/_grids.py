"""Grids: where all members' pieces are alike, packing and unpacking is one reshape, one permute and one copy.

A grid says the same as a step's list of pieces, in the same order on the wire, so each rank may choose for itself; a
runner asks for the grid first and copies piece by piece where there is none (uneven or empty shards, cuts that part
on one dim, groups wider than what moves). Standard library only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ._steps import AllGather, AllToAll, Collective, Coordinate, ReduceScatter

if TYPE_CHECKING:
    from ._regions import Regions


class Grid(NamedTuple):
    """How to read one tensor as another: view it as `lengths`, permute by `order`, make it contiguous.

    What comes out is flat for a pack, and to be viewed as the new local tensor for an unpack.
    """

    lengths: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def plain(self) -> bool:
        """Is it a plain view, with no copy to make?"""
        moved = [i for i in self.order if self.lengths[i] != 1]
        return moved == sorted(moved)


def pack(step: ReduceScatter | AllToAll, coordinate: Coordinate) -> Grid | None:
    """From the local tensor to what goes to the members, one after the other; None if the pieces aren't alike."""
    extra = _extra(step, step.after, step.before)
    if extra is None or not _alike(step, coordinate):
        return None
    lengths = step.before.box(coordinate).length
    view: list[int] = []
    place, inner = {}, []
    for axes, length in zip(extra, lengths):
        for axis in axes:
            place[axis] = len(view)
            view.append(step.before.sizes[axis])
        inner.append(len(view))
        view.append(length // math.prod(step.before.sizes[a] for a in axes))
    return Grid(tuple(view), (*(place[a] for a in step.axes), *inner))


def unpack(step: AllGather | AllToAll, coordinate: Coordinate) -> Grid | None:
    """From what came from the members, one after the other, to the local tensor; None if the pieces aren't alike."""
    extra = _extra(step, step.before, step.after)
    if extra is None or not _alike(step, coordinate):
        return None
    sizes, lengths = step.before.sizes, step.after.box(coordinate).length
    view = [sizes[a] for a in step.axes]
    order = []
    for axes, length in zip(extra, lengths):
        order += [step.axes.index(a) for a in axes]
        order.append(len(view))
        view.append(length // math.prod(sizes[a] for a in axes))
    return Grid(tuple(view), tuple(order))


def _extra(step: Collective, longer: Regions, shorter: Regions) -> list[tuple[int, ...]] | None:
    """The cuts, by dim, that `longer` makes where `shorter` stops, if they are by the group's axes, each once."""
    extra = []
    for many, few in zip(longer.orders, shorter.orders):
        common = min(len(many), len(few))
        if many[:common] != few[:common]:
            return None
        extra.append(many[common:])
    return extra if sorted(a for axes in extra for a in axes) == list(step.axes) else None


def _alike(step: AllGather | ReduceScatter | AllToAll, coordinate: Coordinate) -> bool:
    """Does each member's piece have the same lengths, and no padding after it?"""
    if isinstance(step, AllToAll) and step.op is not None:
        return False
    old, new = step.before.box(coordinate).length, step.after.box(coordinate).length
    sizes, piece = step.before.sizes, 1
    for held, wanted, before, after in zip(old, new, step.before.orders, step.after.orders):
        common = min(len(before), len(after))
        # What is held is cut for others by the target's further cuts; what is wanted comes in the source's.
        parts, pieces = (math.prod(sizes[a] for a in axes[common:]) for axes in (after, before))
        if held % parts or wanted % pieces or held // parts != wanted // pieces:
            return False
        piece *= held // parts
    return isinstance(step, AllToAll) or piece == step.chunk
