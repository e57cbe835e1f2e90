"""Regions: from placements, shape and mesh sizes to the box of the global tensor that each coordinate holds.

`Regions` is the planner's view of a DTensor spec: no mesh, no ranks, no torch. It is canonical, so that two specs that
put the same elements in the same places are one value: axes of size 1 are dropped and strided shards become an order.
Standard library only.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ._boxes import Box, chunk

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

# Reductions that torch knows by name; any other Partial is not ours.
OPS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")


class NotOurs(Exception):
    """The spec or the move can't be planned here; torch's own code has to run it. Its text is the reason."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate of the axis holds the same."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis cuts dim `dim` into chunks, in the order of its coordinates."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """The axis cuts dim `dim` after later axes of the mesh have cut it into `split_factor` chunks."""

    dim: int
    split_factor: int


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the reduction `op` over the coordinates of the axis."""

    op: str = "sum"


Placement = Replicate | Shard | StridedShard | Partial


class Cuts(NamedTuple):
    """What placements say of any tensor with so many dims: the `orders` and `partial` of its `Regions`.

    Attributes:
        odd: the dims that are cut in another order than torch's own: boxes only if the cut is even.
    """

    orders: tuple[tuple[int, ...], ...]
    partial: tuple[str | None, ...]
    odd: tuple[int, ...]

    @staticmethod
    def of(
        placements: Sequence[Placement],
        ndim: int,
        sizes: tuple[int, ...],
        shard_order: Iterable[tuple[int, Sequence[int]]] | None = None,
    ) -> Cuts:
        """Read placements; see `Regions.of`."""
        _check(placements, ndim, sizes)
        plain = _orders(placements, ndim, sizes, strided=False)
        if shard_order is not None:
            orders = _given_orders(shard_order, plain, sizes)
        else:
            orders = _orders(placements, ndim, sizes, strided=True)
        partial = tuple([p.op if isinstance(p, Partial) and n > 1 else None for p, n in zip(placements, sizes)])
        return Cuts(orders, partial, tuple([dim for dim in range(ndim) if orders[dim] != plain[dim]]))

    def on(self, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Regions:
        """Of a tensor of this shape. Raises NotOurs if a cut that must be even isn't."""
        for dim in self.odd:
            order = self.orders[dim]
            if shape[dim] % math.prod([sizes[a] for a in order]):
                raise NotOurs(f"dim {dim} of length {shape[dim]} is cut by axes {order} in that order, unevenly")
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
        placements: Sequence[Placement],
        shape: Iterable[int],
        sizes: Iterable[int],
        shard_order: Iterable[tuple[int, Sequence[int]]] | None = None,
    ) -> Regions:
        """Read a spec: one placement per axis, and optionally the axes of each dim, outer to inner.

        Raises:
            ValueError: the spec is wrong: a length, a dim out of range, reductions of different kinds in one tensor.
            NotOurs: the spec is right but its shards are no boxes, or its reduction has no name that we know.
        """
        shape, sizes = tuple(shape), tuple(sizes)
        return Cuts.of(placements, len(shape), sizes, shard_order).on(shape, sizes)

    def span(self, dim: int, coordinate: Sequence[int]) -> tuple[int, int]:
        """Start and length along `dim` of what `coordinate` holds: one chunk of a chunk for each axis of the order."""
        start, length = 0, self.shape[dim]
        for axis in self.orders[dim]:
            offset, length = chunk(length, self.sizes[axis], coordinate[axis])
            start += offset
        return start, length

    def box(self, coordinate: Sequence[int]) -> Box:
        """What `coordinate` holds of the global tensor."""
        starts, lengths = [], []
        for dim, order in enumerate(self.orders):
            start, length = self.span(dim, coordinate) if order else (0, self.shape[dim])
            starts.append(start)
            lengths.append(length)
        return Box(tuple(starts), tuple(lengths))

    @property
    def most(self) -> int:
        """The elements of the biggest box."""
        return math.prod([self.longest(dim) for dim in range(len(self.shape))])

    def longest(self, dim: int) -> int:
        """The length along `dim` of the biggest box: of the first chunk of the first chunk."""
        length = self.shape[dim]
        for axis in self.orders[dim]:
            length = -(-length // self.sizes[axis])
        return length

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

    def settled(self, axes: Collection[int]) -> Regions:
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


def _check(placements: Sequence[Placement], ndim: int, sizes: tuple[int, ...]) -> None:
    if len(placements) != len(sizes):
        raise ValueError(f"one placement for each axis: got {len(placements)} for a mesh of sizes {sizes}")
    ops = set()
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            ops.add(placement.op)
        elif not isinstance(placement, Replicate) and not 0 <= placement.dim < ndim:
            raise ValueError(f"axis {axis} shards dim {placement.dim} of a tensor with {ndim} dims")
    if len(ops) > 1 and ops != {"sum", "avg"}:
        raise ValueError(f"reductions of different kinds in one tensor: {', '.join(sorted(ops))}")
    if unknown := ops.difference(OPS):
        raise NotOurs(f"a reduction that we don't know: {', '.join(sorted(unknown))}")


def _orders(
    placements: Sequence[Placement], ndim: int, sizes: tuple[int, ...], strided: bool
) -> tuple[tuple[int, ...], ...]:
    # From the last axis to the first: a plain shard cuts before all later axes of its dim, a strided one after those
    # that make up its split factor.
    orders: list[list[int]] = [[] for _ in range(ndim)]
    for axis in reversed(range(len(sizes))):
        placement = placements[axis]
        if sizes[axis] == 1 or not isinstance(placement, (Shard, StridedShard)):
            continue
        order = orders[placement.dim]
        factor = placement.split_factor if strided and isinstance(placement, StridedShard) else 1
        order.insert(_depth(order, sizes, factor, placement), axis)
    return tuple(map(tuple, orders))


def _depth(order: list[int], sizes: tuple[int, ...], factor: int, placement: Placement) -> int:
    for depth in range(len(order) + 1):
        if math.prod(sizes[a] for a in order[:depth]) == factor:
            return depth
    raise NotOurs(f"{placement}: its split factor is no product of the sizes of later axes on its dim")


def _given_orders(
    shard_order: Iterable[tuple[int, Sequence[int]]], plain: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    given = dict(shard_order)
    orders = tuple(tuple(a for a in given.get(dim, ()) if sizes[a] > 1) for dim in range(len(plain)))
    for dim, (order, axes) in enumerate(zip(orders, plain)):
        if sorted(order) != list(axes):
            raise ValueError(f"shard order {order} of dim {dim} doesn't list the axes that shard it: {axes}")
    return orders
