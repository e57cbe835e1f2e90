"""Before what aligned cuts have in common is known without a look at the chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from .senders import Digit, Exchange


def _most_along(exchange: Exchange, dim: int, paired: Collection[Digit], used: Collection[Digit]) -> int:
    """Along one dim, the most elements that a rank sends, summed over all receivers that differ in what they want.

    On a replica axis that isn't `paired`, sender and receiver have the same coordinate. On every other digit that cuts
    the target (`summed`) all values are counted; on an axis outside the group only the sender's own overlaps. But the
    value of the `used` digits of shard axes follows from the digit that they are paired with.
    """
    cuts = exchange.cuts(exchange.after.orders[dim])
    same = [digit for digit in cuts if digit.axis not in exchange.shards and digit not in paired]
    summed = [digit for digit in cuts if digit not in same and digit not in used]
    return _by_overlaps(exchange, dim, same, summed)
