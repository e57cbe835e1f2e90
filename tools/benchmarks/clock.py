"""How times are taken: the median over repeats, of CPU time where one process works alone and of wall time else.

CPU time is this thread's (user and system), so other jobs on the machine hardly move it; it includes page faults.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any


def each(call: Callable[[Any], Any], items: Iterable[Any]) -> tuple[float, list[Any]]:
    """CPU seconds per item of calling with each, and what the calls returned."""
    items = list(items)
    begun = time.thread_time()
    results = [call(item) for item in items]
    return (time.thread_time() - begun) / len(items), results


def seconds_of_all_ranks(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds of one call that all ranks make: wall time between two barriers, and the CPU time of all ranks."""
    import torch.distributed as dist

    dist.barrier()
    begun, cpu = time.perf_counter(), time.process_time()
    call()
    dist.barrier()
    return {"wall": time.perf_counter() - begun, "cpu": summed(time.process_time() - cpu)}


def summed(value: float) -> float:
    import torch
    import torch.distributed as dist

    every = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(every)
    return float(every)


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def geometric_mean(values: Iterable[float]) -> float:
    return statistics.geometric_mean(values)
