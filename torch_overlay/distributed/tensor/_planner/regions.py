"""Regions: from placements, shape and mesh sizes to the box of the global tensor that each coordinate holds.

`Regions` is the planner's view of a DTensor spec: no mesh, no ranks, no torch. An axis of size 1 cuts nothing and has
nothing pending, whatever its placement says, so that specs that differ only there are one value. Placements come as
plain values, one for each axis: the dim that the axis shards (None if it shards none) and the pending reduction (None
if there is none).
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from .boxes import Box, chunk, lengths, longest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

Part = tuple[int, int, tuple[tuple[int, int], ...]]  # of a dim: start, length, and the coordinate on each axis cut

# The reductions that a Partial has by name; one with another isn't planned.
OPS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")


class NotPlanned(Exception):
    """The spec or the move can't be planned here; the step-by-step path has to run it. Its text is the reason."""


class Cuts(NamedTuple):
    """What placements say of any tensor with so many dims: the `orders` and `partial` of its `Regions`. Strided shards
    become an order, too.

    Attributes:
        odd: the dims that are cut in another order than that of the axes, which must be cut evenly. Otherwise strided
            shards are no boxes. Those of an explicit shard order are, but `compute_local_shape_and_global_offset`
            reads placements in the order of the axes, and says other shapes.
    """

    orders: tuple[tuple[int, ...], ...]
    partial: tuple[str | None, ...]
    odd: tuple[int, ...]

    @staticmethod
    def of(
        dims: Sequence[int | None],
        ops: Sequence[str | None],
        ndim: int,
        sizes: tuple[int, ...],
        shard_order: Iterable[tuple[int, Sequence[int]]] | None = None,
        factors: Sequence[int] | None = None,
    ) -> Cuts:
        """Read placements; see `Regions.of`."""
        _check(dims, ops, ndim, sizes)
        plain = _orders(dims, (1,) * len(sizes), ndim, sizes)
        if shard_order is not None:
            orders = _given_orders(shard_order, plain, sizes)
        else:
            orders = plain if factors is None else _orders(dims, factors, ndim, sizes)
        partial = tuple([op if size > 1 else None for op, size in zip(ops, sizes)])
        return Cuts(orders, partial, tuple([dim for dim in range(ndim) if orders[dim] != plain[dim]]))

    def on(self, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Regions:
        """Of a tensor of this shape. Raises NotPlanned if a cut that must be even isn't."""
        for dim in self.odd:
            order = self.orders[dim]
            if shape[dim] % math.prod([sizes[a] for a in order]):
                raise NotPlanned(f"dim {dim} of length {shape[dim]} is cut by axes {order} in that order, unevenly")
        return Regions(shape, sizes, self.orders, self.partial)


class Regions(NamedTuple):
    """Which box each coordinate of a mesh holds, and over which axes the values are still partial.

    Attributes:
        shape: of the global tensor.
        sizes: of the mesh, by axis.
        orders: for each dim, the axes that cut it, outer to inner. An axis is in at most one order; never of size 1.
        partial: for each axis, the pending reduction or None.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    partial: tuple[str | None, ...]

    @staticmethod
    def of(
        dims: Sequence[int | None],
        ops: Sequence[str | None],
        shape: Iterable[int],
        sizes: Iterable[int],
        shard_order: Iterable[tuple[int, Sequence[int]]] | None = None,
        factors: Sequence[int] | None = None,
    ) -> Regions:
        """Read a spec.

        Args:
            dims: for each axis, the dim that it shards, or None.
            ops: for each axis, the pending reduction, or None.
            shape: of the global tensor.
            sizes: of the mesh, by axis.
            shard_order: the axes of every dim that is cut, outer to inner. Without it, their order in the mesh or, with
                `factors`, the order that these say. Not both.
            factors: for each axis, the split factor of a strided shard; 1 for any other placement.

        Raises:
            ValueError: the spec is wrong: a length, a dim out of range, reductions of different kinds in one tensor,
                a shard order that doesn't list the axes of a dim.
            NotPlanned: the spec is right but cuts a dim in another order unevenly, has a split factor that isn't the
                product of the sizes of later axes on its dim, or a reduction whose name we don't know.
        """
        shape, sizes = tuple(shape), tuple(sizes)
        return Cuts.of(dims, ops, len(shape), sizes, shard_order, factors).on(shape, sizes)

    def span(self, dim: int, coordinate: Sequence[int]) -> tuple[int, int]:
        """Start and length along `dim` of what `coordinate` holds: one chunk of a chunk for each axis of the order."""
        start, length = 0, self.shape[dim]
        for axis in self.orders[dim]:
            offset, length = chunk(length, self.sizes[axis], coordinate[axis])
            start += offset
        return start, length

    def box(self, coordinate: Sequence[int]) -> Box:
        """What `coordinate` holds of the global tensor."""
        spans = [self.span(dim, coordinate) for dim in range(len(self.shape))]
        return Box(tuple([start for start, _ in spans]), tuple([length for _, length in spans]))

    @property
    def most(self) -> int:
        """The elements of the biggest box."""
        return math.prod([self.longest(dim) for dim in range(len(self.shape))])

    def longest(self, dim: int) -> int:
        """The length along `dim` of the biggest box: of the first chunk of the first chunk."""
        return longest(self.shape[dim], [self.sizes[axis] for axis in self.orders[dim]])

    def parts(self, box: Box, ranges: Sequence[range]) -> Iterator[tuple[list[int], Box]]:
        """Who holds some of a box, row-major by where it lies: the coordinate, and what it has of the box. Of each axis
        only the coordinates in its range take part, of one that cuts nothing the first of them. Takes time in
        proportion to what is found."""
        dims = [self._along(dim, start, length, ranges) for dim, (start, length) in enumerate(zip(*box))]
        first = [coordinates.start for coordinates in ranges]
        for some in itertools.product(*dims):
            there = first.copy()
            for _, _, places in some:
                for axis, at in places:
                    there[axis] = at
            yield there, Box(tuple([part[0] for part in some]), tuple([part[1] for part in some]))

    def _along(self, dim: int, start: int, length: int, ranges: Sequence[range]) -> list[Part]:
        """The chunks of a dim that meet an interval, ascending, cut down to it."""
        cuts = [(axis, self.sizes[axis], ranges[axis]) for axis in self.orders[dim]]
        return list(_chunks(0, self.shape[dim], cuts, start, start + length)) if length else []

    @property
    def is_even(self) -> bool:
        """Whether all boxes are of one size."""
        cuts = zip(self.shape, self.orders)
        return all(length % math.prod([self.sizes[axis] for axis in order]) == 0 for length, order in cuts)

    @property
    def sharded(self) -> frozenset[int]:
        """The axes that cut some dim."""
        return frozenset(itertools.chain.from_iterable(self.orders))

    @property
    def pending(self) -> frozenset[int]:
        """The axes over which a reduction is pending."""
        return frozenset([axis for axis, op in enumerate(self.partial) if op])

    @property
    def free(self) -> frozenset[int]:
        """The axes along which all coordinates hold the same values; none of size 1."""
        cut = self.sharded
        ends = enumerate(zip(self.sizes, self.partial))
        return frozenset([axis for axis, (size, op) in ends if size > 1 and op is None and axis not in cut])

    def cut(self, orders: Iterable[tuple[int, ...]]) -> Regions:
        """The same tensor and reductions, cut in other orders."""
        return Regions(self.shape, self.sizes, tuple(orders), self.partial)

    def without_pending(self, axes: Collection[int]) -> Regions:
        """The same boxes, with nothing pending over `axes`."""
        partial = tuple([None if a in axes else op for a, op in enumerate(self.partial)])
        return Regions(self.shape, self.sizes, self.orders, partial)

    def __str__(self) -> str:
        """One word an axis: `P·S0·R`; another reduction than a sum is named, as is a dim's order unless ascending."""
        words = ["R" if op is None else "P" if op == "sum" else f"P({op})" for op in self.partial]
        for dim, order in enumerate(self.orders):
            for depth, axis in enumerate(order):
                words[axis] = f"S{dim}" if list(order) == sorted(order) else f"S{dim}#{depth}"
        return "·".join(words) or "(no axes)"


def cut_last(whole: Regions, cut: Regions, axes: tuple[int, ...]) -> int | None:
    """The dim whose shards the axes cut once more, where no other dim is cut otherwise."""
    others = [dim for dim, (before, after) in enumerate(zip(whole.orders, cut.orders)) if before != after]
    if len(others) != 1 or cut.orders[others[0]] != (*whole.orders[others[0]], *axes):
        return None
    return others[0]


def _chunks(start: int, length: int, cuts: Sequence[tuple[int, int, range]], low: int, high: int) -> Iterator[Part]:
    """Of `length` elements from `start` on, cut by these axes, outer to inner, the chunks that meet an interval."""
    if not cuts:
        yield low, high - low, ()
        return
    (axis, size, coordinates), *inner = cuts
    step = -(-length // size)
    first = max((low - start) // step, coordinates.start)
    for at in range(first, min((high - 1 - start) // step + 1, coordinates.stop)):
        begin, end = start + at * step, min(start + (at + 1) * step, start + length)
        if not inner:
            yield max(low, begin), min(high, end) - max(low, begin), ((axis, at),)
            continue
        for part_start, part_length, places in _chunks(begin, end - begin, inner, max(low, begin), min(high, end)):
            yield part_start, part_length, ((axis, at), *places)


def least_overlap(before: Regions, after: Regions) -> int:
    """How many of the elements that it holds after, every rank holds before, at least. Counted dim by dim, so that it
    may be less than any rank has."""
    least = 1
    for length, old, new in zip(before.shape, before.orders, after.orders):
        longer, shorter = (old, new) if len(old) > len(new) else (new, old)
        if longer[: len(shorter)] != shorter:
            return 0  # where the orders part, some rank has the first chunk and wants the last
        least *= min(lengths(length, [before.sizes[axis] for axis in longer]))
    return least


def _check(dims: Sequence[int | None], ops: Sequence[str | None], ndim: int, sizes: tuple[int, ...]) -> None:
    if not len(dims) == len(ops) == len(sizes):
        got = f"{len(dims)} dims and {len(ops)} reductions"
        raise ValueError(f"one placement for each axis: got {got} for a mesh of sizes {sizes}")
    for axis, dim in enumerate(dims):
        if dim is not None and not 0 <= dim < ndim:
            raise ValueError(f"axis {axis} shards dim {dim} of a tensor with {ndim} dims")
    kinds = {op for op in ops if op is not None}
    if len(kinds) > 1 and kinds != {"sum", "avg"}:
        raise ValueError(f"reductions of different kinds in one tensor: {', '.join(sorted(kinds))}")
    if unknown := kinds.difference(OPS):
        raise NotPlanned(f"a reduction that we don't know: {', '.join(sorted(unknown))}")


def _orders(
    dims: Sequence[int | None], factors: Sequence[int], ndim: int, sizes: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    # From the last axis to the first: a plain shard cuts before all later axes of its dim, a strided one after those
    # that make up its split factor.
    orders: list[list[int]] = [[] for _ in range(ndim)]
    for axis in reversed(range(len(sizes))):
        dim = dims[axis]
        if sizes[axis] > 1 and dim is not None:
            orders[dim].insert(_depth(orders[dim], sizes, factors[axis], axis), axis)
    return tuple(map(tuple, orders))


def _depth(order: list[int], sizes: tuple[int, ...], factor: int, axis: int) -> int:
    for depth in range(len(order) + 1):
        if math.prod(sizes[a] for a in order[:depth]) == factor:
            return depth
    raise NotPlanned(
        f"axis {axis} has a split factor of {factor}, which is no product of the sizes of later axes on its dim"
    )


def _given_orders(
    shard_order: Iterable[tuple[int, Sequence[int]]], plain: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    given = dict(shard_order)
    orders = tuple(tuple(a for a in given.get(dim, ()) if sizes[a] > 1) for dim in range(len(plain)))
    for dim, (order, axes) in enumerate(zip(orders, plain)):
        if sorted(order) != list(axes):
            raise ValueError(f"shard order {order} of dim {dim} doesn't list the axes that shard it: {axes}")
    return orders
