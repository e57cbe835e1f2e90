"""Regions: from placements, shape and mesh sizes to the box of the global tensor that
each coordinate holds.

`Regions` is the planner's view of a DTensor spec: no mesh, no ranks, no torch. An axis
of size 1 cuts nothing and has nothing pending, whatever its placement says, so that
specs that differ only there are one value. Placements come as plain values, one for
each axis: the dim that the axis shards (None if it shards none) and the pending
reduction (None if there is none).

Boxes: axis-parallel blocks of a tensor, in elements, and the chunk rule that cuts them.

A `Box` is what one rank holds of a global tensor; everything a redistribution copies,
sends or receives is a box.
"""

from __future__ import annotations

import itertools
import math
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence


class _BoxFields(NamedTuple):
    start: tuple[int, ...]
    length: tuple[int, ...]


class Box(_BoxFields):
    """A block of a tensor: its first element and its length along each dim, in
    elements.

    A box with a zero length is empty, wherever it starts; two empty boxes hold the same
    elements (none) although they need not be equal.
    """

    @cached_property
    def elements(self) -> int:
        """How many elements the box holds; 1 for the box of a tensor without dims."""
        return math.prod(self.length)

    def meet(self, other: Box) -> Box:
        """The elements in both boxes, as a box; empty if they don't meet."""
        start = tuple(map(max, self.start, other.start))
        length = tuple(
            max(0, min(a + n, b + m) - s)
            for s, a, n, b, m in zip(
                start, self.start, self.length, other.start, other.length
            )
        )
        return Box(start, length)

    def inside(self, outer: Box) -> Box:
        """The same box, counted from the first element of `outer`: where it is in the
        tensor that holds `outer`."""
        return Box(tuple(a - b for a, b in zip(self.start, outer.start)), self.length)

    def then(self, other: Box) -> Box | None:
        """Both as one box, if its elements, row-major, are those of this one and then
        those of the other."""
        for dim, length in enumerate(self.length):
            inner = dim + 1
            if other.start[dim] == self.start[dim] + length:
                if (
                    self.start[inner:] != other.start[inner:]
                    or self.length[inner:] != other.length[inner:]
                ):
                    return None
                return Box(
                    self.start,
                    (
                        *self.length[:dim],
                        length + other.length[dim],
                        *self.length[inner:],
                    ),
                )
            if length != 1 or (other.start[dim], other.length[dim]) != (
                self.start[dim],
                1,
            ):
                return None
        return None


def in_runs(placed: Iterable[tuple[int | None, Box]]) -> list[tuple[int | None, Box]]:
    """The same boxes and where each begins in a flat tensor, with those as one that
    follow one another there and are one box; what has no place stays as it is.

    >>> one, two, apart = Box((0, 0), (2, 3)), Box((2, 0), (1, 3)), Box((3, 0), (1, 3))
    >>> in_runs([(0, one), (6, two), (10, apart)])
    [(0, Box(start=(0, 0), length=(3, 3))), (10, Box(start=(3, 0), length=(1, 3)))]
    """
    found: list[tuple[int | None, Box]] = []
    end: int | None = None
    for at, box in placed:
        both = found[-1][1].then(box) if at is not None and at == end else None
        if both is None:
            found.append((at, box))
        else:
            found[-1] = found[-1][0], both
        end = None if at is None else at + box.elements
    return found


def chunk(length: int, parts: int, part: int) -> tuple[int, int]:
    """Start and length of piece `part` when `length` elements are cut into at most
    `parts` pieces.

    All pieces have the length of the first, rounded up, until the elements run out: the
    last pieces may be shorter or empty. This is the rule of `torch.chunk`, with the
    pieces that it leaves out given as empty ones at the end.

    >>> [chunk(5, 4, i) for i in range(4)]  # 2 + 2 + 1 + 0, not 2 + 1 + 1 + 1
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-length // parts)
    start = min(part * step, length)
    return start, min(step, length - start)


def longest(length: int, parts: Sequence[int]) -> int:
    """The length of the longest piece when `length` elements are cut into `parts[0]`
    pieces, each of these into `parts[1]`, and so on: that of the first piece.

    >>> longest(9, (2, 2))  # 5 and 4, which are 3, 2, 2 and 2
    3
    """
    for count in parts:
        length = -(-length // count)
    return length


def lengths(length: int, parts: Sequence[int]) -> set[int]:
    """The different lengths of all these pieces. The shortest need not come from the
    shortest one before: 5 in 4 gives a 0, 4 in 4 doesn't.

    >>> sorted(lengths(9, (2, 2)))
    [2, 3]
    """
    found = {length}
    for count in parts:
        found = set().union(*[_chunk_lengths(one, count) for one in found])
    return found


def _chunk_lengths(length: int, parts: int) -> set[int]:
    step = -(-length // parts)
    if step * parts == length:
        return {step}
    whole, rest = divmod(length, step)
    found = {step, rest} if rest else {step}
    return found if whole + bool(rest) == parts else found | {0}


def runs(length: int, parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The pieces that aren't empty, from first to last: a length, and how many one
    after the other have it. Each run is as long as it can be, so that equal cuts have
    equal runs however they are made.

    >>> [*runs(7, (4,))], [*runs(7, (2, 2))], [*runs(24, (2, 3, 2))]
    ([(2, 3), (1, 1)], [(2, 3), (1, 1)], [(2, 12)])
    """
    for one, equal in itertools.groupby(_runs(length, parts), key=lambda run: run[0]):
        yield one, sum(count for _, count in equal)


def _runs(length: int, parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    whole = math.prod(parts)
    if length % whole == 0:
        if length:
            yield length // whole, whole
        return
    step, inner = -(-length // parts[0]), parts[1:]
    full, rest = divmod(length, step)
    if step % math.prod(inner) == 0:
        yield step // math.prod(inner), full * math.prod(inner)
    else:
        for _ in range(full):
            yield from _runs(step, inner)
    if rest:
        yield from _runs(rest, inner)


def same_pieces(length: int, one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether both ways to cut leave the same pieces, apart from empty ones. Takes time
    only where the first pieces are equally long, and then as much as there are runs.

    >>> same_pieces(7, (4,), (2, 2)), same_pieces(6, (4,), (2, 2))  # 2,2,2; 2,1,2,1
    (True, False)
    """
    if one == other:
        return True
    if longest(length, one) != longest(length, other):
        return False
    return all(
        a == b for a, b in itertools.zip_longest(runs(length, one), runs(length, other))
    )


# of a dim: start, length, and the coordinate on each axis cut
Chunk = tuple[int, int, tuple[tuple[int, int], ...]]

# The reductions that a Partial has by name; one with another isn't planned.
OPS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")


class NotPlanned(Exception):
    """The spec or the move can't be planned here; the step-by-step path has to run it.
    Its text is the reason."""


class Cuts(NamedTuple):
    """What placements say of any tensor with so many dims: the `orders` and `partial`
    of its `Regions`. Strided shards become an order, too.

    Attributes:
        odd: the dims that are cut in another order than that of the axes, which must be
            cut evenly. Otherwise strided shards are no boxes. Those of an explicit
            shard order are, but `compute_local_shape_and_global_offset` reads
            placements in the order of the axes, and says other shapes.
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
        return Cuts(
            orders,
            partial,
            tuple([dim for dim in range(ndim) if orders[dim] != plain[dim]]),
        )

    def on(self, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Regions:
        """Of a tensor of this shape. Raises NotPlanned if a cut that must be even
        isn't."""
        for dim in self.odd:
            order = self.orders[dim]
            if shape[dim] % math.prod([sizes[a] for a in order]):
                raise NotPlanned(
                    f"dim {dim} of length {shape[dim]} is cut by axes {order} in that "
                    "order, unevenly"
                )
        return Regions(shape, sizes, self.orders, self.partial)


class _RegionsFields(NamedTuple):
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    partial: tuple[str | None, ...]


class Regions(_RegionsFields):
    """Which box each coordinate of a mesh holds, and over which axes the values are
    still partial.

    A value, a tuple of its fields. What follows from them is computed once: a search
    asks for it dozens of times.

    Attributes:
        shape: of the global tensor.
        sizes: of the mesh, by axis.
        orders: for each dim, the axes that cut it, outer to inner. An axis is in at
            most one order; never of size 1.
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
        """Read a spec.

        Args:
            dims: for each axis, the dim that it shards, or None.
            ops: for each axis, the pending reduction, or None.
            shape: of the global tensor.
            sizes: of the mesh, by axis.
            shard_order: the axes of every dim that is cut, outer to inner. Without it,
                their order in the mesh or, with `factors`, the order that these say.
                Not both.
            factors: for each axis, the split factor of a strided shard; 1 for any other
                placement.

        Raises:
            ValueError: the spec is wrong: a length, a dim out of range, reductions of
                different kinds in one tensor, a shard order that doesn't list the axes
                of a dim.
            NotPlanned: the spec is right but cuts a dim in another order unevenly, has
                a split factor that isn't the product of the sizes of later axes on its
                dim, or a reduction whose name we don't know.
        """
        shape, sizes = tuple(shape), tuple(sizes)
        return Cuts.of(dims, ops, len(shape), sizes, shard_order, factors).on(
            shape, sizes
        )

    def span(self, dim: int, coordinate: Sequence[int]) -> tuple[int, int]:
        """Start and length along `dim` of what `coordinate` holds: one chunk of a chunk
        for each axis of the order."""
        start, length = 0, self.shape[dim]
        for axis in self.orders[dim]:
            offset, length = chunk(length, self.sizes[axis], coordinate[axis])
            start += offset
        return start, length

    def box(self, coordinate: Sequence[int]) -> Box:
        """What `coordinate` holds of the global tensor."""
        spans = [self.span(dim, coordinate) for dim in range(len(self.shape))]
        return Box(
            tuple([start for start, _ in spans]), tuple([length for _, length in spans])
        )

    @cached_property
    def most(self) -> int:
        """The elements of the biggest box."""
        return math.prod(self.longest)

    @cached_property
    def longest(self) -> tuple[int, ...]:
        """The lengths of the biggest box: along each dim, of the first chunk of the
        first chunk."""
        cuts = zip(self.shape, self.orders)
        return tuple([longest(n, [self.sizes[a] for a in axes]) for n, axes in cuts])

    def parts(
        self, box: Box, ranges: Sequence[range], origin: Sequence[int] | None = None
    ) -> Iterator[tuple[list[int], Box]]:
        """Who holds some of a box, row-major by where it lies: the coordinate, and what
        it has of the box, counted from `origin` if that is given. Of each axis only the
        coordinates in its range take part, of one that cuts nothing the first of them.
        Takes time in proportion to what is found."""
        zero = (0,) * len(self.shape) if origin is None else origin
        dims = [
            self._along(dim, *span, ranges, zero[dim])
            for dim, span in enumerate(zip(*box))
        ]
        first = [coordinates.start for coordinates in ranges]
        for some in itertools.product(*dims):
            there = first.copy()
            for _, _, places in some:
                for axis, at in places:
                    there[axis] = at
            yield (
                there,
                Box(
                    tuple([part[0] for part in some]), tuple([part[1] for part in some])
                ),
            )

    def _along(
        self, dim: int, start: int, length: int, ranges: Sequence[range], zero: int
    ) -> list[Chunk]:
        """The chunks of a dim that meet an interval, ascending, cut down to it."""
        cuts = [(axis, self.sizes[axis], ranges[axis]) for axis in self.orders[dim]]
        if not length:
            return []
        return [
            (at - zero, some, places)
            for at, some, places in _chunks(
                0, self.shape[dim], cuts, start, start + length
            )
        ]

    @cached_property
    def is_even(self) -> bool:
        """Whether all boxes are of one size."""
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
        """The same tensor and reductions, cut in other orders."""
        return Regions(self.shape, self.sizes, tuple(orders), self.partial)

    def without_pending(self, axes: Collection[int]) -> Regions:
        """The same boxes, with nothing pending over `axes`."""
        partial = tuple(
            [None if a in axes else op for a, op in enumerate(self.partial)]
        )
        return Regions(self.shape, self.sizes, self.orders, partial)

    def __str__(self) -> str:
        """One word an axis: `P·S0·R`; another reduction than a sum is named, as is a
        dim's order unless ascending."""
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
    """The dim whose shards the axes cut once more, where no other dim is cut
    otherwise."""
    others = [
        dim
        for dim, (before, after) in enumerate(zip(whole.orders, cut.orders))
        if before != after
    ]
    if len(others) != 1 or cut.orders[others[0]] != (*whole.orders[others[0]], *axes):
        return None
    return others[0]


def _chunks(
    start: int, length: int, cuts: Sequence[tuple[int, int, range]], low: int, high: int
) -> Iterator[Chunk]:
    """Of `length` elements from `start` on, cut by these axes, outer to inner, the
    chunks that meet an interval."""
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
        for part_start, part_length, places in _chunks(
            begin, end - begin, inner, max(low, begin), min(high, end)
        ):
            yield part_start, part_length, ((axis, at), *places)


def common(old: tuple[int, ...], new: tuple[int, ...]) -> int:
    """How many axes from the outermost on two orders have in common."""
    depth, most = 0, min(len(old), len(new))
    while depth < most and old[depth] == new[depth]:
        depth += 1
    return depth


def least_overlap(before: Regions, after: Regions) -> int:
    """How many of the elements that it holds after, every rank holds before, at least.
    Counted dim by dim, so that it may be less than any rank has."""
    least = 1
    for length, old, new in zip(before.shape, before.orders, after.orders):
        longer, shorter = (old, new) if len(old) > len(new) else (new, old)
        if longer[: len(shorter)] != shorter:
            # where the orders part, some rank has the first chunk and wants the last
            return 0
        least *= min(lengths(length, [before.sizes[axis] for axis in longer]))
    return least


def _check(
    dims: Sequence[int | None],
    ops: Sequence[str | None],
    ndim: int,
    sizes: tuple[int, ...],
) -> None:
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
    if len(kinds) > 1 and kinds != {"sum", "avg"}:
        raise ValueError(
            f"reductions of different kinds in one tensor: {', '.join(sorted(kinds))}"
        )
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
    # From the last axis to the first: a plain shard cuts before all later axes of its
    # dim, a strided one after those that make up its split factor.
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
        f"axis {axis} has a split factor of {factor}, which is no product of the "
        "sizes of later axes on its dim"
    )


def _given_orders(
    shard_order: Iterable[tuple[int, Sequence[int]]],
    plain: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
) -> tuple[tuple[int, ...], ...]:
    given = dict(shard_order)
    orders = tuple(
        tuple(a for a in given.get(dim, ()) if sizes[a] > 1)
        for dim in range(len(plain))
    )
    for dim, (order, axes) in enumerate(zip(orders, plain)):
        if sorted(order) != list(axes):
            raise ValueError(
                f"shard order {order} of dim {dim} doesn't list the axes that shard "
                f"it: {axes}"
            )
    return orders
