"""Before steps in rounds are priced."""

from __future__ import annotations

import math


class Cost(...):
    def _time(self, step: Collective, itemsize: int) -> float:
        latency, bandwidth = self.latency, self.bandwidth
        if self.axes:
            bandwidth = min(self.axes[a][0] for a in step.axes)
            latency = max(self.axes[a][1] for a in step.axes)
        weight = EXCHANGE if isinstance(step, AllToAll) else 1.0
        size = max(arriving(step), leaving(step)) * itemsize
        return latency * (1 + math.log2(step.ranks)) / 2 + weight * size / bandwidth
