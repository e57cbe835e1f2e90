"""Reductions: what is done to pending values before they go to their targets, and in how many phases.

Where ranks that hold terms of one value will hold different parts of it, each gets its own part reduced (a
reduce-scatter): half the bytes of reducing the whole everywhere, and memory for its part only. What a phase needs
beside sources and targets stays below a share of the budget; of a tensor that takes more than that, slabs go one after
the other. Standard library only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ...distributed.tensor._planner.moves import cut_toward
from ...distributed.tensor._planner.regions import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...distributed.tensor._planner.regions import Regions

# Of a budget, what is packed in one phase. gloo copies what it is given, and the result is half as much at most.
SHARE = 2, 5


class Reduced(NamedTuple):
    """From terms of a value to the value.

    Attributes:
        before: what each coordinate holds, pending.
        after: what it has then, nothing pending: a part of that, or the same.
        scattered: the pending axes that cut `after` and not `before`, outer first; over the others all is reduced.
    """

    before: Regions
    after: Regions
    scattered: tuple[int, ...]

    @staticmethod
    def toward(before: Regions, target: Regions, elsewhere: bool = True) -> Reduced:
        """Parts as the target on the same mesh wants them, as far as it cuts what is there further.

        Args:
            elsewhere: whether other parts are made where a pending axis cuts the target in another way. They have to
                go along that axis then, to ranks that want them.
        """
        after = cut_toward(before, target, before.pending)
        wanted = target.sharded & before.pending - after.sharded if elsewhere else ()
        return _scatter(before, after, sorted(wanted))

    @staticmethod
    def apart(before: Regions) -> Reduced:
        """Parts of equal size, whoever wants them."""
        return _scatter(before, before, sorted(before.pending))

    @staticmethod
    def everywhere(before: Regions) -> Reduced:
        """All of it."""
        return Reduced(before, before.without_pending(before.pending), ())

    @property
    def steps(self) -> tuple[tuple[int, str, bool], ...]:
        """Axis, operation, and whether each rank gets its part only. What scatters comes first."""
        others = sorted(self.before.pending - {*self.scattered})
        axes = [*((axis, True) for axis in self.scattered), *((axis, False) for axis in others)]
        return tuple([(axis, self.before.partial[axis] or "", scatters) for axis, scatters in axes])

    @property
    def packed(self) -> int:
        """The elements that are packed at most, with what makes the parts equal."""
        sizes = [self.before.sizes[axis] for axis in self.scattered]
        return max(self.before.most, self.after.most * math.prod(sizes))


def _scatter(before: Regions, after: Regions, axes: Sequence[int]) -> Reduced:
    """Cut further by these axes, each along the dim that leaves the smallest parts."""
    for axis in axes:
        cuts = [_cut_further(after, dim, axis) for dim in range(len(after.shape))]
        best = min(cuts, key=lambda regions: regions.most, default=after)
        if best.most < after.most:
            after = best
    scattered = [axis for old, new in zip(before.orders, after.orders) for axis in new[len(old) :]]
    return Reduced(before, after.without_pending(before.pending), tuple(scattered))


def _cut_further(regions: Regions, dim: int, axis: int) -> Regions:
    orders = list(regions.orders)
    orders[dim] = (*orders[dim], axis)
    return regions.cut(orders)


class Portion(NamedTuple):
    """What of a tensor goes in one phase.

    Attributes:
        number: of the tensor.
        reduction: what is done to it; None if nothing is pending.
        slab: the part of the global tensor; None for all of it.
        packed: the bytes that a rank packs for its reduction, at most.
    """

    number: int
    reduction: Reduced | None = None
    slab: Box | None = None
    packed: int = 0

    def results(self, itemsize: int) -> int:
        """The bytes of its result on a rank at most."""
        if self.reduction is None:
            return 0
        return _most(self.reduction.after, self.slab) * itemsize


def place_in(outer: Box, box: Box) -> Box:
    """Where a box lies in the tensor that holds `outer`. An empty one may start anywhere, as where a slab misses what a
    rank holds; it is put at the start, so that it is inside.

    >>> place_in(Box((4, 0), (4, 8)), Box((4, 0), (4, 8)).meet(Box((9, 0), (2, 8))))
    Box(start=(0, 0), length=(0, 8))
    """
    return box.inside(outer) if box.elements else Box((0,) * len(box.start), box.length)


def phases(reductions: Sequence[Reduced | None], itemsizes: Sequence[int], budget: int) -> list[list[Portion]]:
    """What goes together, in order; the same on every rank. All that isn't pending goes in the first phase."""
    limit = budget * SHARE[0] // SHARE[1]
    found = [[Portion(number) for number, each in enumerate(reductions) if each is None]]
    room = limit
    for number, (reduction, itemsize) in enumerate(zip(reductions, itemsizes)):
        for part in _parts(number, reduction, itemsize, limit) if reduction is not None else ():
            if part.packed > room and found[-1]:
                found.append([])
                room = limit
            found[-1].append(part)
            room -= part.packed
    return found


def _parts(number: int, reduction: Reduced, itemsize: int, limit: int) -> Iterator[Portion]:
    """The tensor, or slabs of it."""
    before, size = reduction.before, reduction.packed * itemsize
    if size <= limit:
        yield Portion(number, reduction, None, size)
        return
    # Slabs along a dim that the reduction cuts would be in the parts of some ranks only.
    dims = [dim for dim, (old, new) in enumerate(zip(before.orders, reduction.after.orders)) if old == new]
    if size > limit * math.prod([before.longest(dim) for dim in dims]):
        reduction, dims = Reduced.everywhere(before), list(range(len(before.shape)))
        size = before.most * itemsize
    whole = Box((0,) * len(before.shape), before.shape)
    for slab in _slabs(whole, before, dims, limit * before.most // size):
        yield Portion(number, reduction, slab, size * _most(before, slab) // before.most)


def _slabs(slab: Box, regions: Regions, dims: Sequence[int], most: int) -> Iterator[Box]:
    """A slab, cut along these dims until no coordinate has more than so many elements of it."""
    elements = _most(regions, slab)
    lengths = {dim: min(regions.longest(dim), slab.length[dim]) for dim in dims}
    lengths = {dim: length for dim, length in lengths.items() if length > 1}  # others can't be cut
    if elements <= most or not lengths:
        yield slab
        return

    def step(dim: int) -> int:
        return max(most * lengths[dim] // elements, 1)

    # Along the dim that needs the fewest cuts, of those along which cuts are enough.
    dim = min(lengths, key=lambda dim: (elements > most * lengths[dim], slab.length[dim] / step(dim)))
    for begin in range(0, slab.length[dim], step(dim)):
        start, length = list(slab.start), list(slab.length)
        start[dim] += begin
        length[dim] = min(step(dim), slab.length[dim] - begin)
        yield from _slabs(Box(tuple(start), tuple(length)), regions, dims, most)


def _most(regions: Regions, slab: Box | None) -> int:
    """The elements that a coordinate has of a slab, at most."""
    if slab is None:
        return regions.most
    return math.prod([min(regions.longest(dim), length) for dim, length in enumerate(slab.length)])
