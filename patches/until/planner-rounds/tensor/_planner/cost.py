"""Before steps run in rounds."""

from __future__ import annotations


class Cost(...):
    """What a collective costs: latency, and over the bandwidth (bytes per second and rank) the bytes that the busiest
    rank gets or those that the busiest rank sends, whichever is more.

    The defaults are assumptions of the right order for a few hosts, not measurements; give `axes` where they matter.

    Attributes:
        latency: seconds that a collective of two ranks takes without data, plus half of that each time their number
            doubles.
        axes: (bandwidth, latency) of each axis; a joint group is as slow as its slowest axis.
    """

    round_bytes = ...
