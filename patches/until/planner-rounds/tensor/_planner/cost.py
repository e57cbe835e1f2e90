"""Before steps run in rounds."""

from __future__ import annotations

import math


class Cost(...):
    """What a collective costs: latency, and over the bandwidth (bytes per second and rank) the bytes that the busiest
    rank gets or those that the busiest rank sends, whichever is more.

    The defaults are assumptions of the right order for a few hosts, not measurements; give `axes` where they matter.

    Attributes:
        latency: seconds that a collective of two ranks takes without data; half as much more each time their number
            doubles.
        axes: (bandwidth, latency) of each axis; a joint group is as slow as its slowest axis.
    """

    least_round = ...

    def _time(self, step: Collective, itemsize: int) -> float:
        latency, bandwidth = self.latency, self.bandwidth
        if self.axes:
            bandwidth = min(self.axes[a][0] for a in step.axes)
            latency = max(self.axes[a][1] for a in step.axes)
        weight = EXCHANGE if isinstance(step, AllToAll) else 1.0
        size = max(arriving(step), leaving(step)) * itemsize
        return latency * (1 + math.log2(step.ranks)) / 2 + weight * size / bandwidth
