"""Memory of the device: the peaks of some pairs of placements against stock, and what communicators take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import pairs
from benchmarks.allocations import allocated

from . import RANKS, Check, Found, Run, asked, figures
from .groups import communicators

SLACK = 1 << 16  # bytes by which an allocator may round


def memory(run: Run) -> Iterator[Found]:
    """On the CPU, where tensors are small, the peaks are only shown."""
    shape = (64, 64) if run.dry else (4096, 4096)
    both = [next(asked(run, [Check(peaks, (shape,))], run.best, stock=stock)) for stock in (True, False)]
    yield from both
    if all(figures(both)):
        stock, ours = figures(both)
        more = {pair: (stock[pair], peak) for pair, peak in ours.items() if peak > stock[pair] + SLACK}
        said = {"pairs": len(ours), "stock": sum(stock.values()), "overlay": sum(ours.values()), "more": more}
        yield {"check": "peaks, both sides", "outcome": "wrong" if more else "right", "figures": said}
    yield from communicators(run)


def peaks(mesh: Any, rank: int, shape: tuple[int, int]) -> dict[str, int]:
    import torch

    flat = pairs.flattened_mesh((2, 2), mesh.device_type)
    by_pair = {}
    for pair in pairs.fewer(RANKS):
        source, target = pairs.source_tensor(pair, flat, shape), pairs.placements(pair.target)
        with torch.no_grad():
            by_pair[str(pair)] = peak(functools.partial(source.redistribute, flat, target), mesh.device_type)
    return by_pair


def peak(call: Callable[[], Any], device: str) -> int:
    if device == "cpu":
        return allocated([call])[0].peak
    import torch

    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
