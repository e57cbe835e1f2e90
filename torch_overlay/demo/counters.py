"""Counts what a rank really does, with the same eyes on stock torch and under the overlay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

# The operators that every collective ends in, whoever called it: c10d itself, functional collectives, DTensor, FSDP2.
_PREFIX = "c10d::"
_KINDS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
}


def count_collectives(call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """Run `call` and say what it returned and how many collectives of each kind this rank ran for it."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        result = call()
    # Of `recorded.events()` most of the time goes into who called whom.
    names = [event.name() for event in recorded.profiler.kineto_results.events()]
    return result, dict(Counter(_kind(name.removeprefix(_PREFIX)) for name in names if name.startswith(_PREFIX)))


def _kind(operator: str) -> str:
    bare = operator.strip("_")
    return next((kind for start, kind in _KINDS.items() if bare.startswith(start)), bare)
