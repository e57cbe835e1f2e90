"""What the constants should be on this device: from which size on large pieces are handled apart (`exchange.LARGE`),
and the latency, bandwidth and rounds that the planner assumes (`_planner/cost.py`). On one GPU ranks share it, so that
only the first is a value to take over."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import Check, Found, Run, asked

FAST = 0.97  # of the time: what counts as faster


def tuning(run: Run) -> Iterator[Found]:
    most = 18 if run.dry else 26  # powers of two, in bytes
    yield from asked(run, [Check(large_pieces, (most,)), Check(assumed_costs, (most,))], run.best)


# --- on every rank


def large_pieces(mesh: Any, rank: int, most: int) -> dict[str, Any] | None:
    """On rank 0, while the others wait: microseconds with one copy more, and with more calls, by bytes; and the size
    from which on more calls are faster at that size and at all larger ones, None if they never are."""
    import torch.distributed as dist

    figures = None
    if rank == 0:
        figures = {name: _by_size(make, mesh.device_type, most) for name, make in _USERS.items()}
    dist.barrier()
    return figures


def _by_size(make: Callable[[str, int], Callable[[], Any]], device: str, most: int) -> dict[str, Any]:
    from unittest import mock

    from torch_overlay.distributed.tensor._runner import exchange

    times: dict[str, list[float]] = {}
    least = None
    for power in range(16, most + 1, 2):
        call, both = make(device, 1 << power), []
        for large in (1 << 62, 0):
            with mock.patch.object(exchange, "LARGE", {"cpu": large}):
                both.append(_microseconds(call, device))
        times[str(1 << power)] = both
        least = (least or 1 << power) if both[1] < FAST * both[0] else None
    return {"one copy, more calls": times, "least": least}


def _joined(device: str, size: int) -> Callable[[], Any]:
    """Four blocks of a matrix that don't lie in one stretch."""
    from torch_overlay.distributed.tensor._runner.exchange import joined

    rows = max(size // 4 // 256, 4)
    whole = torch.zeros(rows, 256, device=device)
    parts = [whole[: rows // 2, :96], whole[: rows // 2, 96:], whole[rows // 2 :, :32], whole[rows // 2 :, 32:]]
    return lambda: joined(parts)


def _sorted(device: str, size: int) -> Callable[[], Any]:
    """Two blocks, each in another order within."""
    from torch_overlay.distributed.tensor._planner.grids import Grid
    from torch_overlay.distributed.tensor._runner.exchange import unpacking_in_place

    inner = max(size // 4 // 2 // 8, 4)
    lengths = (2, 4, inner, 2)
    unpack = unpacking_in_place(Grid(lengths, lengths, (0, 2, 1, 3)), (2 * inner, 8))
    flat = torch.zeros(16 * inner, device=device)
    return lambda: unpack(flat)


_USERS = {"joined": _joined, "unpacking in place": _sorted}


def _microseconds(call: Callable[[], Any], device: str) -> float:
    """The median of some calls, to the end of the work."""
    from benchmarks.redistribute import settle

    times = []
    for _ in range(7):
        settle(device)
        begun = time.perf_counter()
        call()
        settle(device)
        times.append((time.perf_counter() - begun) * 1e6)
    return round(statistics.median(times[1:]), 1)


def assumed_costs(mesh: Any, rank: int, most: int) -> dict[str, Any]:
    """Latency in microseconds without data, bandwidth in GB/s at the largest size, and what an all-to-all of that size
    takes in rounds, by their bytes; as rank 0 sees it. Beside that, what the planner assumes."""
    import torch.distributed as dist

    from torch_overlay.distributed.tensor._planner.cost import _ASSUMED, EXCHANGE

    device, size = mesh.device_type, 1 << most
    own, given = torch.zeros(2, device=device), torch.zeros(size // 4, device=device)
    ranks, came = dist.get_world_size(), torch.empty_like(given)
    shared = {"2": mesh.get_group(0), "4": None}
    latency = {n: _microseconds(lambda g=g: dist.all_reduce(own, group=g), device) for n, g in shared.items()}
    gathered = torch.empty(len(given) // ranks * ranks, device=device)
    one = given[: len(given) // ranks]
    gather = _microseconds(lambda: dist.all_gather_into_tensor(gathered, one), device)
    rounds = {}
    for parts in (1, 2, 4, 8):
        pairs = [*zip(came.chunk(parts), given.chunk(parts))]
        rounds[str(size // parts)] = _microseconds(lambda p=pairs: [dist.all_to_all_single(*one) for one in p], device)
    share = (ranks - 1) / ranks * size
    assumed = _ASSUMED.get(device, _ASSUMED["cpu"])
    return {
        "latency": latency,
        "all-gather, GB/s": round(share / gather / 1e3, 2),
        "all-to-all, GB/s": round(share / rounds[str(size)] / 1e3, 2),
        "all-to-all in rounds of so many bytes": rounds,
        "assumed": {"latency": assumed.latency * 1e6, "GB/s": assumed.bandwidth / 1e9, "exchange": EXCHANGE},
    }
