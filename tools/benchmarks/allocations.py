"""Peak memory of a call, from the events of torch's CPU allocator: it sees what operators allocate inside, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.autograd.profiler import profile, record_function

_MARK = "measured call"


class Memory(NamedTuple):
    """Bytes beyond what was allocated before a call."""

    peak: int  # the most at any one time during the call, its result included
    kept: int  # what is still allocated after it, while only its result is held


def allocated(calls: Sequence[Callable[[], object]]) -> list[Memory]:
    """What each call allocates on the CPU, in this thread. Each is made once before, so that caches are filled."""
    for call in calls:
        call()
    with profile(use_cpu=True, profile_memory=True) as profiled:
        for call in calls:
            with record_function(_MARK):
                result = call()
            del result
    return _read(profiled.kineto_results.events())


def _read(events: Sequence[Any]) -> list[Memory]:
    """The memory of each marked span; each event says by how much it changed what is allocated."""
    spans = sorted((event.start_ns(), event.end_ns()) for event in events if event.name() == _MARK)
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda change: change[0])
    memories, at = [], 0
    for begun, ended in spans:
        held = peak = 0
        while at < len(changes) and changes[at][0] <= ended:
            if changes[at][0] >= begun:
                held += changes[at][1]
                peak = max(peak, held)
            at += 1
        memories.append(Memory(peak, held))
    return memories
