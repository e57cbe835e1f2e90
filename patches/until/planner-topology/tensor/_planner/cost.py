"""Before the speed of the axes may be known."""

from __future__ import annotations

import math


class Cost(...):
    """What a collective costs: latency, and over the bandwidth (bytes per second and rank) the bytes that the busiest
    rank gets or those that the busiest rank sends, whichever is more.

    The defaults are assumptions of the right order for a few hosts, not measurements.

    Attributes:
        latency: seconds that a collective of two ranks takes without data, plus half of that each time their number
            doubles.
    """

    axes = ...
    of = ...
    by_speed = ...

    def _time(self, step: Collective, itemsize: int) -> float:
        weight = EXCHANGE if isinstance(step, AllToAll) else 1.0
        size = max(arriving(step), leaving(step)) * itemsize
        return self.latency * (1 + math.log2(step.ranks)) / 2 + weight * size / self.bandwidth
