"""Before what a nearest sender keeps is known."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from .senders import Diagonal, Exchange

_kept = ...


def most_sent(exchange: Exchange, diagonals: Collection[Diagonal], least_kept: int) -> int:
    """The elements that the busiest rank sends to others. Never less than that, and more where cuts are uneven, for
    example, or where a rank keeps more than the least.

    From R·S0 to S0·R on (2, 2), sender and receiver have the same coordinate on axis 0, and the receiver has any on
    axis 1: (0, 0) and (1, 1) send what they hold to two ranks, one of them themselves. On a diagonal the receiver's
    coordinate on axis 1 follows from that on axis 0: each rank sends what it holds to one.

    Args:
        least_kept: what every rank, at least, wants of what it holds already.
    """
    after, shards = exchange.after, exchange.shards
    paired = {diagonal.replica for diagonal in diagonals}
    used = {diagonal.shard for diagonal in diagonals}
    alike = exchange.cuts([axis for axis in exchange.axes if axis in shards and axis not in after.sharded])
    sent = math.prod([digit.base for digit in alike if digit not in used])
    # In a pair of bases 2 (replica) and 5 (shard), one value of the replica digit goes with up to 3 of the shard digit.
    sent *= math.prod([-(-shard.base // replica.base) for replica, shard in diagonals])
    for dim in range(len(after.shape)):
        sent *= _most_along(exchange, dim, paired, used)
    return sent - least_kept
