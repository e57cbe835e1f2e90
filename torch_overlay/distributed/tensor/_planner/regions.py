"""Regions: which box of the global tensor each coordinate of a mesh holds. They follow
from the placements, the shape and the mesh sizes.

`Regions` is the planner's view of a DTensor spec, without a mesh, ranks or tensors.
Placements come as plain values, two for each axis: the dim that the axis shards, or
None, and the pending reduction, or None. An axis of size 1 neither cuts nor has
anything pending, whatever its placement is, so that specs which differ only there are
equal.

The reductions are the rows of one table, `OPS`.
"""

from __future__ import annotations

import itertools
import math
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from .boxes import Box, chunk, lengths, longest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence


# A piece of a dim: start, length, and (axis, coordinate) for each axis that cuts it.
Chunk = tuple[int, int, tuple[tuple[int, int], ...]]


class ReduceOp(NamedTuple):
    """What the planner and the runner know of one reduction.

    Attributes:
        function: the name of the function in `torch` that reduces two terms. None for
            an average, which is planned as a division and a sum.
        keeps_value: a value becomes a term of this reduction as it is, in
            `Partial._partition_value`: the maximum of equal terms is each of them.
        wrong_by_parts: reducing the real and the imaginary part of a complex number as
            separate numbers gives a wrong result, so it is refused.
    """

    function: str | None
    keeps_value: bool = False
    wrong_by_parts: bool = False


# By the name of `Partial.reduce_op`; a Partial with another one isn't planned. A row is
# enough for the planner and for an all-to-all. An all-reduce and a reduce-scatter hand
# the name to c10d, which has to know it, too.
OPS: dict[str, ReduceOp] = {
    "sum": ReduceOp("add"),
    "avg": ReduceOp(None, keeps_value=True),
    "max": ReduceOp("maximum", keeps_value=True, wrong_by_parts=True),
    "min": ReduceOp("minimum", keeps_value=True, wrong_by_parts=True),
    "product": ReduceOp("mul", wrong_by_parts=True),
    "band": ReduceOp("bitwise_and"),
    "bor": ReduceOp("bitwise_or"),
    "bxor": ReduceOp("bitwise_xor"),
}


class NotPlanned(Exception):
    """This spec or this change can't be planned, so the step-by-step path has to run.
    The message is the reason."""


class Cuts(NamedTuple):
    """What placements say about any tensor with so many dims: the `orders` and
    `partial` of its `Regions`. Strided shards are expressed as orders.

    Attributes:
        orders: for each dim, the axes that cut it, outer to inner.
        partial: for each axis, the pending reduction or None.
        reordered_dims: the dims that are cut in another order than that of the axes.
            They must be cut evenly, for two reasons. Uneven strided shards aren't
            boxes. Uneven shards in an explicit order are boxes, but
            `compute_local_shape_and_global_offset` assumes the order of the axes, and
            returns other shapes.
    """

    orders: tuple[tuple[int, ...], ...]
    partial: tuple[str | None, ...]
    reordered_dims: tuple[int, ...]

    @staticmethod
    def of(
        dims: Sequence[int | None],
        ops: Sequence[str | None],
        ndim: int,
        sizes: tuple[int, ...],
        shard_order: Iterable[tuple[int, Sequence[int]]] | None = None,
        factors: Sequence[int] | None = None,
    ) -> Cuts:
        """Return the cuts and pending reductions of placements, for any shape."""
        _check(dims, ops, ndim, sizes)
        mesh_orders = _orders(dims, (1,) * len(sizes), ndim, sizes)
        if shard_order is not None:
            orders = _given_orders(shard_order, mesh_orders, sizes)
        else:
            orders = (
                mesh_orders if factors is None else _orders(dims, factors, ndim, sizes)
            )
        # Over one rank the only term is the value.
        partial = tuple([op if size > 1 else None for op, size in zip(ops, sizes)])
        return Cuts(
            orders,
            partial,
            tuple([dim for dim in range(ndim) if orders[dim] != mesh_orders[dim]]),
        )

    def on(self, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Regions:
        # Even boxes have the same shape in every order, so all readers of the spec
        # agree.
        for dim in self.reordered_dims:
            order = self.orders[dim]
            if shape[dim] % math.prod([sizes[a] for a in order]):
                raise NotPlanned(
                    f"dim {dim} of length {shape[dim]} is cut by axes {order} in that "
                    "order, unevenly (a strided shard, or a shard order of its own)"
                )
        return Regions(shape, sizes, self.orders, self.partial)


class _RegionsFields(NamedTuple):
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    partial: tuple[str | None, ...]


class Regions(_RegionsFields):
    """Which box each coordinate of a mesh holds, and over which axes values are
    partial.

    Regions are values: tuples of their fields. Properties are computed once, since one
    search reads them dozens of times.

    Attributes:
        shape: the global shape.
        sizes: the size of each axis.
        orders: for each dim, the axes that cut it, outer to inner. An axis is in at
            most one order, and axes of size 1 are in none.
        partial: for each axis, the pending reduction or None.
    """

    @staticmethod
    def of(
        dims: Sequence[int | None],
        ops: Sequence[str | None],
        shape: Iterable[int],
        sizes: Iterable[int],
        shard_order: Iterable[tuple[int, Sequence[int]]] | None = None,
        factors: Sequence[int] | None = None,
    ) -> Regions:
        """Make the regions of a spec: of each axis the dim that it shards, or None, and
        its pending reduction, or None. `shard_order` has the axes of each dim from
        outer to inner; else `factors` have the split factor of each strided shard, 1
        for other placements. Raises NotPlanned for a spec that is right, and isn't
        planned; ValueError for a wrong one."""
        shape, sizes = tuple(shape), tuple(sizes)
        return Cuts.of(dims, ops, len(shape), sizes, shard_order, factors).on(
            shape, sizes
        )

    def span(self, dim: int, coordinate: Sequence[int]) -> tuple[int, int]:
        """Return (start, length) of what `coordinate` holds on `dim`, in global
        elements: the axes in ``orders[dim]`` cut it one after the other, as
        `torch.chunk` does."""
        start, length = 0, self.shape[dim]
        for axis in self.orders[dim]:
            offset, length = chunk(length, self.sizes[axis], coordinate[axis])
            start += offset
        return start, length

    def box(self, coordinate: Sequence[int]) -> Box:
        """Return the box that `coordinate` holds; empty if a cut leaves it nothing."""
        spans = [self.span(dim, coordinate) for dim in range(len(self.shape))]
        return Box(
            tuple([start for start, _ in spans]), tuple([length for _, length in spans])
        )

    @cached_property
    def most(self) -> int:
        return math.prod(self.largest_shape)

    @cached_property
    def largest_shape(self) -> tuple[int, ...]:
        """The shape of the largest box: the first chunk of the first chunk and so
        on."""
        cuts = zip(self.shape, self.orders)
        return tuple([longest(n, [self.sizes[a] for a in axes]) for n, axes in cuts])

    def parts(
        self, box: Box, ranges: Sequence[range], origin: Sequence[int] | None = None
    ) -> Iterator[tuple[list[int], Box]]:
        """Yield who holds which part of a box, as (coordinate, part), in row-major
        order of the tensor, none empty. The time grows with the parts, not with the
        ranks."""
        zero = (0,) * len(self.shape) if origin is None else origin
        dims = [
            self._along(dim, *span, ranges, zero[dim])
            for dim, span in enumerate(zip(*box))
        ]
        first_coordinate = [coordinates.start for coordinates in ranges]
        for chunks in itertools.product(*dims):
            coordinate = first_coordinate.copy()
            for _, _, places in chunks:
                for axis, number in places:
                    # An axis cuts one dim at most, so the dims don't overwrite one
                    # another.
                    coordinate[axis] = number
            yield (
                coordinate,
                Box(
                    tuple([part[0] for part in chunks]),
                    tuple([part[1] for part in chunks]),
                ),
            )

    def _along(
        self, dim: int, start: int, length: int, ranges: Sequence[range], zero: int
    ) -> list[Chunk]:
        """Return the pieces of a dim that overlap an interval, ascending and cut to
        it."""
        cuts = [(axis, self.sizes[axis], ranges[axis]) for axis in self.orders[dim]]
        # An empty box is nowhere, so nobody holds a part of it.
        if not length:
            return []
        return [
            (begin - zero, overlap, places)
            for begin, overlap, places in _chunks(
                0, self.shape[dim], cuts, start, start + length
            )
        ]

    @cached_property
    def is_even(self) -> bool:
        """True if all dims are cut evenly, so that all boxes have the same shape."""
        cuts = zip(self.shape, self.orders)
        return all(
            length % math.prod([self.sizes[axis] for axis in order]) == 0
            for length, order in cuts
        )

    @cached_property
    def sharded(self) -> frozenset[int]:
        """The axes that cut some dim."""
        return frozenset(itertools.chain.from_iterable(self.orders))

    @cached_property
    def pending(self) -> frozenset[int]:
        """The axes over which a reduction is pending."""
        return frozenset([axis for axis, op in enumerate(self.partial) if op])

    @cached_property
    def free(self) -> frozenset[int]:
        """The axes along which all coordinates hold the same values; none of size 1."""
        cut = self.sharded
        ends = enumerate(zip(self.sizes, self.partial))
        return frozenset(
            [
                axis
                for axis, (size, op) in ends
                if size > 1 and op is None and axis not in cut
            ]
        )

    def cut(self, orders: Iterable[tuple[int, ...]]) -> Regions:
        """Return the same tensor and reductions, cut in other orders (unchecked)."""
        return Regions(self.shape, self.sizes, tuple(orders), self.partial)

    def without_pending(self, axes: Collection[int]) -> Regions:
        """Return these regions with no reduction pending over `axes`."""
        partial = tuple(
            [None if a in axes else op for a, op in enumerate(self.partial)]
        )
        return Regions(self.shape, self.sizes, self.orders, partial)

    def __str__(self) -> str:
        """One word for each axis, as in `P·S0·R`; with the place of each axis in the
        order of a dim if that isn't ascending: `S0#1·S0#0`."""
        words = [
            "R" if op is None else "P" if op == "sum" else f"P({op})"
            for op in self.partial
        ]
        for dim, order in enumerate(self.orders):
            for depth, axis in enumerate(order):
                words[axis] = (
                    f"S{dim}" if list(order) == sorted(order) else f"S{dim}#{depth}"
                )
        return "·".join(words) or "(no axes)"


def cut_last(whole: Regions, cut: Regions, axes: tuple[int, ...]) -> int | None:
    """Return the dim that the axes cut once more, from `whole` to `cut`; None if others
    do."""
    changed_dims = [
        dim
        for dim, (before, after) in enumerate(zip(whole.orders, cut.orders))
        if before != after
    ]
    if len(changed_dims) != 1 or cut.orders[changed_dims[0]] != (
        *whole.orders[changed_dims[0]],
        *axes,
    ):
        return None
    return changed_dims[0]


def _chunks(
    start: int, length: int, cuts: Sequence[tuple[int, int, range]], low: int, high: int
) -> Iterator[Chunk]:
    """Yield the pieces that overlap the interval from `low` to `high`, which lies
    within the `length` elements from `start` on and isn't empty."""
    if not cuts:
        yield low, high - low, ()
        return
    (axis, size, coordinates), *inner = cuts
    step = -(-length // size)
    # Only chunks that overlap are visited: an axis may have thousands of coordinates.
    first = max((low - start) // step, coordinates.start)
    for coordinate in range(
        first, min((high - 1 - start) // step + 1, coordinates.stop)
    ):
        begin, end = (
            start + coordinate * step,
            min(start + (coordinate + 1) * step, start + length),
        )
        if not inner:
            yield (
                max(low, begin),
                min(high, end) - max(low, begin),
                ((axis, coordinate),),
            )
            continue
        for part_start, part_length, inner_coordinates in _chunks(
            begin, end - begin, inner, max(low, begin), min(high, end)
        ):
            yield part_start, part_length, ((axis, coordinate), *inner_coordinates)


def common_prefix(old: tuple[int, ...], new: tuple[int, ...]) -> int:
    """Return how many axes, from the outermost on, two orders have in common."""
    depth, most = 0, min(len(old), len(new))
    while depth < most and old[depth] == new[depth]:
        depth += 1
    return depth


def least_overlap(before: Regions, after: Regions) -> int:
    """Return a lower bound, counted dim by dim, of the elements that a rank keeps."""
    elements = 1
    for length, old, new in zip(before.shape, before.orders, after.orders):
        longer, shorter = (old, new) if len(old) > len(new) else (new, old)
        # If one order begins with the other, each piece of the longer cut lies within
        # one piece of the shorter, and overlaps it as a whole.
        if longer[: len(shorter)] != shorter:
            # Where the orders differ, some rank holds the first chunk and needs the
            # last.
            return 0
        elements *= min(lengths(length, [before.sizes[axis] for axis in longer]))
    return elements


def _check(
    dims: Sequence[int | None],
    ops: Sequence[str | None],
    ndim: int,
    sizes: tuple[int, ...],
) -> None:
    """Check the placements of a spec, as `Regions.of` takes them."""
    if not len(dims) == len(ops) == len(sizes):
        got = f"{len(dims)} dims and {len(ops)} reductions"
        raise ValueError(
            f"one placement for each axis: got {got} for a mesh of sizes {sizes}"
        )
    for axis, dim in enumerate(dims):
        if dim is not None and not 0 <= dim < ndim:
            raise ValueError(
                f"axis {axis} shards dim {dim} of a tensor with {ndim} dims"
            )
    kinds = {op for op in ops if op is not None}
    # A sum and an average mix: terms of the average are divided, then all are summed.
    if len(kinds) > 1 and kinds != {"sum", "avg"}:
        raise ValueError(
            f"reductions of different kinds in one tensor: {', '.join(sorted(kinds))}"
        )
    # Partial takes any name, for example that of a user's subclass.
    if unknown := kinds.difference(OPS):
        raise NotPlanned(
            f"a reduction that we don't know: {', '.join(sorted(unknown))}"
        )


def _orders(
    dims: Sequence[int | None],
    factors: Sequence[int],
    ndim: int,
    sizes: tuple[int, ...],
) -> tuple[tuple[int, ...], ...]:
    """Return for each dim the axes that cut it, outer to inner, by the split
    factors."""
    # From the last axis to the first: a plain shard cuts before all later axes of its
    # dim, a strided one after those whose sizes multiply to its split factor.
    orders: list[list[int]] = [[] for _ in range(ndim)]
    for axis in reversed(range(len(sizes))):
        dim = dims[axis]
        if sizes[axis] > 1 and dim is not None:
            orders[dim].insert(_depth(orders[dim], sizes, factors[axis], axis), axis)
    return tuple(map(tuple, orders))


def _depth(order: list[int], sizes: tuple[int, ...], factor: int, axis: int) -> int:
    """Return how many axes of the order cut before a shard with this split factor."""
    for depth in range(len(order) + 1):
        if math.prod(sizes[a] for a in order[:depth]) == factor:
            return depth
    raise NotPlanned(
        f"axis {axis} has a split factor of {factor}, which is no product of the "
        "sizes of later axes on its dim"
    )


def _given_orders(
    shard_order: Iterable[tuple[int, Sequence[int]]],
    mesh_orders: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
) -> tuple[tuple[int, ...], ...]:
    """Check an explicit shard order against the placements; drop axes of size 1."""
    given = dict(shard_order)
    orders = tuple(
        tuple(a for a in given.get(dim, ()) if sizes[a] > 1)
        for dim in range(len(mesh_orders))
    )
    for dim, (order, axes) in enumerate(zip(orders, mesh_orders)):
        if sorted(order) != list(axes):
            raise ValueError(
                f"shard order {order} of dim {dim} doesn't list the axes that shard "
                f"it: {axes}"
            )
    return orders
