"""The busiest rank of an all-to-all: how much it sends, for the cost model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .regions import overlaps

if TYPE_CHECKING:
    from collections.abc import Collection

    from .regions import Regions
    from .senders import Diagonal, Digit, Exchange


def most_sent(exchange: Exchange, diagonals: Collection[Diagonal], least_kept: int) -> int:
    """The elements that the busiest rank sends to others. Never less than that, and exact in most cases where all
    cuts are even and made of the same primes.

    Args:
        least_kept: what every rank, at least, wants of what it holds already.
    """
    before, after, shards = exchange.before, exchange.after, exchange.shards
    if shards.issuperset(after.sharded):  # all that a rank holds goes to the same number of others
        return math.prod([before.sizes[axis] for axis in _alike(exchange)]) * before.most - least_kept
    if not all(_aligned(exchange, dim) for dim in range(len(before.shape))):
        return _most_uneven(exchange, diagonals) - least_kept
    tied = exchange.tied_digits()
    paired = {diagonal.replica for diagonal in diagonals}
    idle = math.prod([d.base for d in tied if d.axis not in shards and d not in paired])
    terms = math.prod([before.sizes[axis] for axis in exchange.reduced])
    return idle * terms * after.most - max(least_kept, 0 if paired else _kept(exchange, tied))


def _alike(exchange: Exchange) -> list[int]:
    """The axes of the group along which ranks hold different parts or terms, and want the same."""
    return [axis for axis in exchange.axes if axis in exchange.shards and axis not in exchange.after.sharded]


def _kept(exchange: Exchange, tied: list[Digit]) -> int:
    """The elements that a nearest sender keeps for itself, and so doesn't send: what it wants of what it holds. If some
    nearest sender wants none of that, 0.

    The tied digits of a rank's coordinate say in which box of the source its new box lies. It keeps some if that is the
    box that it holds. For the digits of replica axes it is, on each nearest sender; for those of a shard axis, if the
    axis cuts the same dim before and after, inside of as many boxes.
    """
    before, after = exchange.before, exchange.after
    old, new = _depths(before), _depths(after)
    if any(old.get(digit.axis) != new[digit.axis] for digit in tied if digit.axis in exchange.shards):
        return 0
    return math.prod([min(before.longest(dim), after.longest(dim)) for dim in range(len(before.shape))])


def _depths(regions: Regions) -> dict[int, tuple[int, int]]:
    """For each axis that cuts a dim, the dim and the number of boxes that the axes outside of it make there."""
    found = {}
    for dim, order in enumerate(regions.orders):
        boxes = 1
        for axis in order:
            found[axis] = dim, boxes
            boxes *= regions.sizes[axis]
    return found


def _most_uneven(exchange: Exchange, diagonals: Collection[Diagonal]) -> int:
    """The elements that a rank has to send at most, with its own, whatever the cuts."""
    used = {diagonal.shard for diagonal in diagonals}
    receivers = math.prod([digit.base for digit in exchange.cuts(_alike(exchange)) if digit not in used])
    # Of a pair with two bases, a coordinate on the replica axis may belong to several on the shard axis.
    receivers *= math.prod([-(-shard.base // replica.base) for replica, shard in diagonals])
    return receivers * math.prod([_most_along(exchange, dim, diagonals) for dim in range(len(exchange.before.shape))])


def _most_along(exchange: Exchange, dim: int, diagonals: Collection[Diagonal]) -> int:
    """Along one dim, the most elements that a rank sends, summed over all coordinates of receivers that can differ.

    For example, four elements go from R·S0 to S0·R on (2, 2). Without a diagonal, sender and receiver have the same
    coordinate on axis 0: rank (1, 1) sends the two elements that it holds to both ranks (1, j), of which
    `_most_uneven` knows, and (0, 1) sends none. On a diagonal of both axes, the receivers of (0, 1) and of (1, 1) may
    have any coordinate on axis 0: summed over it, each rank sends its two elements once.

    So a paired replica digit is summed over, and its shard digit isn't any more. If that one cuts the target, too, the
    receivers' value of it isn't looked at: the one counts with which most is sent.
    """
    paired, used = ({pair[side] for pair in diagonals} for side in (0, 1))
    cuts = exchange.cuts(exchange.after.orders[dim])
    same = [digit for digit in cuts if digit.axis not in exchange.shards and digit not in paired]
    summed = [digit for digit in cuts if digit not in same and digit not in used]
    if len(summed) == len(cuts):
        return exchange.before.longest(dim)  # all of it is wanted by somebody, and by one coordinate only
    most: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}  # by sender, and what is summed over
    order = exchange.before.orders[dim]
    for elements, held, wanted in overlaps(exchange.before, exchange.after, dim):
        sender = (*[held[a] for a in order], *[digit.of(wanted) for digit in same])
        key = sender, tuple([digit.of(wanted) for digit in summed])
        most[key] = max(most.get(key, 0), elements)
    sent: dict[tuple[int, ...], int] = {}
    for (sender, _), elements in most.items():
        sent[sender] = sent.get(sender, 0) + elements
    return max(sent.values(), default=0)


def _aligned(exchange: Exchange, dim: int) -> bool:
    """Is this dim cut as before, or evenly and by the same primes as far as it is cut before and after?"""
    before, after = exchange.before, exchange.after
    orders = before.orders[dim], after.orders[dim]
    if orders[0] == orders[1]:
        return True
    old, new = ([before.sizes[axis] for axis in order] for order in orders)
    if before.shape[dim] % max(math.prod(old), math.prod(new)):
        return False
    if all(a == b for a, b in zip(old, new)):
        return True
    return all(a.base == b.base for a, b in zip(*map(exchange.cuts, orders)))
