"""How times are taken: the median over repeats, of CPU time where one process works alone and of wall time else.

CPU time is this thread's (user and system), so other jobs on the machine hardly move it; it includes page faults.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

BLOCK_SECONDS = 0.02  # long against the clock's own cost


def cpu_seconds(call: Callable[[], Any]) -> float:
    """CPU seconds of one call."""
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


def often_enough(seconds: float, block: float = BLOCK_SECONDS, least: int = 2, most: int = 100) -> int:
    """How many calls of this length fill a block."""
    return max(least, min(most, round(block / max(seconds, 1e-9))))


def each(call: Callable[[Any], Any], items: Iterable[Any]) -> tuple[float, list[Any]]:
    """CPU seconds per item of calling with each, and what the calls returned."""
    items = list(items)
    begun = time.thread_time()
    results = [call(item) for item in items]
    return (time.thread_time() - begun) / len(items), results


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def geometric_mean(values: Iterable[float]) -> float:
    return statistics.geometric_mean(values)
