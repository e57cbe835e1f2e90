"""Times of a `Transfer` from two trainers to two servers beside a bare all-to-all of the same bytes, and how often the
host waits for the device in a run."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from . import Check, Found, Run, asked
from .links import now

Shapes = dict[str, tuple[tuple[int, ...], int | None]]  # by name the shape, and the dim that servers cut; None: whole
TURNS = 5
AT_MOST = {"model": 1.2, "many small": 6.0, "middle": 1.5}  # times the bare all-to-all


def speed(run: Run) -> Iterator[Found]:
    """The small ones first: the model takes seconds to make."""
    names = ("many small", "middle", "model")
    yield from asked(run, [Check(times, (name, keep, run.dry)) for name in names for keep in (False, True)], run.best)


def shapes(name: str, small: bool) -> Shapes:
    if name == "many small":
        return {str(number): ((128, 64), 0) for number in range(100 if small else 1000)}
    if name == "middle":
        return {str(number): ((1024, 512), number % 2) for number in range(10 if small else 300)}
    layers, hidden, wide, words = (2, 64, 256, 512) if small else (28, 1536, 8960, 151936)
    tensors: Shapes = {"embed": ((words, hidden), 0), "norm": ((hidden,), None)}
    for layer in range(layers):
        for key, rows in (("q", hidden), ("k", hidden // 4), ("v", hidden // 4), ("gate", wide), ("up", wide)):
            tensors[f"{layer}.{key}"] = (rows, hidden), 0
        tensors[f"{layer}.o"], tensors[f"{layer}.down"] = ((hidden, hidden), 1), ((hidden, wide), 1)
        tensors |= {f"{layer}.norm{number}": ((hidden,), None) for number in range(2)}
    return tensors


# --- on every rank


def times(mesh: Any, rank: int, name: str, keep: bool, small: bool) -> dict[str, Any] | str:
    """Milliseconds of a run, its CPU time, and those of the bare all-to-all; medians of some turns."""
    import torch.distributed as dist

    from torch_overlay import Transfer

    source, target, sent = _sides(mesh.device_type, rank, shapes(name, small))
    with Transfer(source, target, keep=keep) as sync:
        run, cpu = _median(sync.run, mesh.device_type)
        with _counted() as waits:
            sync.run()
        figures: dict[str, Any] = {"exchanges": sync.exchanges, "MB": round(2 * sent / 1e6, 1), "host waits": waits}
    if target and any(bool((tensor.to_local() != value % 100).any()) for value, tensor in enumerate(target.values())):
        return "other values came"
    into, out = ([0, 0, sent // 2, sent // 2], [0] * 4)
    if rank > 1:
        into, out = out, [sent // 2, sent // 2, 0, 0]
    given, came = (torch.zeros(sum(sizes), dtype=torch.bfloat16, device=mesh.device_type) for sizes in (into, out))
    bare, _ = _median(lambda: dist.all_to_all_single(came, given, out, into), mesh.device_type)
    figures |= {"run": run, "its CPU": cpu, "bare": bare, "times": round(run / max(bare, 1e-3), 2)}
    return figures | {"at most": AT_MOST[name]}


def _sides(device: str, rank: int, tensors: Shapes) -> tuple[Any, Any, int]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    train, serve = DeviceMesh(device, [0, 1]), DeviceMesh(device, [2, 3])
    sides: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    sent = 0
    for number, (name, (shape, dim)) in enumerate(tensors.items()):
        whole = torch.Size(shape).numel()
        sent += whole // 2 if dim is not None else whole
        cut = 0 if rank < 2 else dim
        size = [length // 2 if at == cut else length for at, length in enumerate(shape)]
        local = torch.full(size, float(number % 100) if rank < 2 else -1.0, dtype=torch.bfloat16, device=device)
        placement = Replicate() if cut is None else Shard(cut)
        sides[rank > 1][name] = DTensor.from_local(local, train if rank < 2 else serve, [placement], run_check=False)
    return sides[0] or None, sides[1] or None, sent // 2 * 2


def _median(call: Callable[[], object], device: str) -> tuple[float, float]:
    """Milliseconds of a call on all ranks and their devices, and of this process; after one call that isn't counted."""
    call()
    wall, cpu = [], []
    for _ in range(TURNS):
        begun, used = now(device), time.process_time()
        call()
        cpu.append(time.process_time() - used)
        wall.append(now(device) - begun)
    return round(statistics.median(wall) * 1e3, 2), round(statistics.median(cpu) * 1e3, 2)


@contextlib.contextmanager
def _counted() -> Iterator[dict[str, int]]:
    """Count how often the host waits for the device: for an event, by our code; else, as torch warns of it."""
    from torch_overlay.rendezvous.team import Team

    counts = {"events": 0, "others": 0}
    wait = Team.wait_for_event

    def counted(team: Any, event: Any) -> None:
        counts["events"] += 1
        wait(team, event)

    is_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    with mock.patch.object(Team, "wait_for_event", counted), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if is_cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            if is_cuda:
                torch.cuda.set_sync_debug_mode("default")
            counts["others"] = sum("synchroniz" in str(each.message) for each in warned)
