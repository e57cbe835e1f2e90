"""The busiest rank of an all-to-all: how much it sends, for the cost model.

A rank sends to one receiver for each coordinate on the shard axes; the receiver's coordinates on the replica axes
follow from the sender's, or from the diagonal. To one receiver it sends a product of overlaps, one for each dim. So all
that it sends is at most a product, too: of what it sends along each dim (`_most_along`), and of the number of receivers
that want the same. No rank is looked at.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .boxes import longest

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from .senders import Diagonal, Digit, Exchange


def most_sent(exchange: Exchange, diagonals: Collection[Diagonal], least_kept: int) -> int:
    """The elements that the busiest rank sends to others: exact where all dims are aligned, see `_aligned`, else not
    less than that, but for a few elements at the ends of uneven chunks.

    From R·S0 to S0·R on (2, 2), sender and receiver have the same coordinate on axis 0, and the receiver has any on
    axis 1: (0, 0) and (1, 1) send what they hold to two ranks, one of them themselves. On a diagonal the receiver's
    coordinate on axis 1 follows from that on axis 0: each rank sends what it holds to one.

    Args:
        least_kept: what every rank, at least, wants of what it holds already.
    """
    before, after, shards = exchange.before, exchange.after, exchange.shards
    paired = {diagonal.replica for diagonal in diagonals}
    used = {diagonal.shard for diagonal in diagonals}
    alike = exchange.cuts([axis for axis in exchange.axes if axis in shards and axis not in after.sharded])
    sent = math.prod([digit.base for digit in alike if digit not in used])
    # In a pair of bases 2 (replica) and 5 (shard), one value of the replica digit goes with up to 3 of the shard digit.
    sent *= math.prod([-(-shard.base // replica.base) for replica, shard in diagonals])
    dims = range(len(before.shape))
    for dim in dims:
        sent *= _most_along(exchange, dim, paired, used)
    nearest = not paired and all(_aligned(exchange, dim) for dim in dims)
    return sent - max(least_kept, _kept(exchange) if nearest else 0)


def _most_along(exchange: Exchange, dim: int, paired: Collection[Digit], used: Collection[Digit]) -> int:
    """Along one dim, the most elements that a rank sends, summed over all receivers that differ in what they want.

    On a replica axis that isn't `paired`, sender and receiver have the same coordinate. On every other digit that cuts
    the target (`summed`) all values are counted; on an axis outside the group only the sender's own overlaps. But the
    value of the `used` digits of shard axes follows from the digit that they are paired with.
    """
    cuts = exchange.cuts(exchange.after.orders[dim])
    same = [digit for digit in cuts if digit.axis not in exchange.shards and digit not in paired]
    summed = [digit for digit in cuts if digit not in same and digit not in used]
    if len(summed) == len(cuts):
        return exchange.before.longest(dim)  # the parts of all receivers cover what a rank holds once
    length, levels = exchange.after.shape[dim], []
    for axis in exchange.after.orders[dim]:
        length = longest(length, [exchange.after.sizes[axis]])
        levels += [(length * digit.unit, digit in summed) for digit in cuts if digit.axis == axis]
    return _most_within(exchange.before.longest(dim), levels)


def _most_within(elements: int, levels: Sequence[tuple[int, bool]]) -> int:
    """Of so many elements in a row, the most that lie where some digits have one value each. The levels are the
    digits from the most significant on: the elements over which one stays as it is, and whether all its values count.

    From R·S0 to S0·S0 on (2, 2), eight elements: rank (0, 0) holds four in a row, and sends those where axis 0 is at
    0, which are four in a row, too; axis 1, over two elements each, has any value.

    >>> _most_within(4, [(4, False), (2, True)])
    4

    Six of eight, where the first digit has any value, and the second, over two elements each, only one:

    >>> _most_within(6, [(4, True), (2, False)])
    4
    """
    for depth, (block, counts) in enumerate(levels):
        if not counts:
            elements = min(elements, block)
        elif elements > block > 0:
            whole, rest = divmod(elements, block)
            inner = levels[depth + 1 :]
            return whole * _most_within(block, inner) + _most_within(rest, inner)
    return elements


def _kept(exchange: Exchange) -> int:
    """The least that a rank which sends at all wants of what it holds, by nearest senders and where cuts are aligned:
    the shorter of both boxes along each dim. But 0 if the new cut has a digit of a shard axis at a place where the old
    cut has another: from S0·S1 to S1·S0 on (2, 2), rank (0, 1) holds the first half of dim 0 and wants the second. A
    dim that is cut as before, even if unevenly, scales what is sent and what is kept alike."""
    before, after = exchange.before, exchange.after
    for old, new in zip(before.orders, after.orders):
        for held, wanted in zip(exchange.cuts(old), exchange.cuts(new)):
            if wanted.axis in exchange.shards and wanted != held:
                return 0
    return math.prod([min(before.longest(dim), after.longest(dim)) for dim in range(len(before.shape))])


def _aligned(exchange: Exchange, dim: int) -> bool:
    """Whether this dim is cut as before; or evenly, and the digits of both cuts have the same bases, one after the
    other, as far as the shorter cut goes."""
    before, after = exchange.before, exchange.after
    orders = before.orders[dim], after.orders[dim]
    if orders[0] == orders[1]:
        return True
    old, new = map(exchange.cuts, orders)
    if any(a.base != b.base for a, b in zip(old, new)):
        return False
    longer = max(old, new, key=len)  # the other is its beginning
    return before.shape[dim] % math.prod([digit.base for digit in longer]) == 0
