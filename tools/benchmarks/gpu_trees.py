"""What `bench gpu` measures beside single tensors, on every rank: trees, a Transfer, offload, peaks, compiled calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .clock import median
from .gpu_ranks import _now, _open, _store
from .sides import OVERLAY, SIDES, STOCK, in_turns, on

Calls = dict[str, Callable[[], Any]]  # by side
PARAMETERS = 48


def trees(
    rank: int, size: int, port: int, backend: str, device: str, share: int, nbytes: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Seconds or bytes by what was done, and side: both in turns on the same ranks, the median of all turns."""
    import torch
    import torch.distributed as dist

    from . import pairs

    _open(_store(port), 0, rank, size, backend, device, share)
    meshes = {}
    for side in SIDES:
        with on(side):
            meshes[side] = pairs.flattened_mesh((size // 2, 2), device)
    found: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        calls = _of_trees(meshes, nbytes)
        calls["a compiled redistribution"] = _compiled(meshes, device)
        if device == "cuda" and backend == "nccl":
            calls["a redistribution in a CUDA graph"] = _captured(meshes)
        for name, call in calls.items():
            found[f"{name}, time"] = _seconds(call, device, repeats)
        name = "a tree made whole"
        found[f"{name}, peak"] = {side: _peak_on(side, calls[name][side], device) for side in SIDES}
    dist.destroy_process_group()
    return found


def _of_trees(meshes: dict[str, Any], nbytes: int) -> dict[str, Calls]:
    """Of so many parameters of this size: made whole, brought into tensors that are there, and offloaded."""
    from torch.distributed import _state_dict_utils
    from torch.distributed.tensor import Replicate

    import torch_overlay

    from .pairs import parameters

    given = {side: parameters(meshes[side], nbytes, PARAMETERS) for side in SIDES}
    whole = (Replicate(), Replicate())
    served = {side: {name: one.redistribute(placements=whole) for name, one in given[side].items()} for side in SIDES}
    with on(OVERLAY):
        sync = torch_overlay.Transfer(given[OVERLAY], served[OVERLAY])

    def one_by_one() -> dict[str, Any]:
        return {name: one.redistribute(placements=whole) for name, one in given[STOCK].items()}

    def copied() -> None:
        for name, one in one_by_one().items():
            served[STOCK][name].to_local().copy_(one.to_local())

    together = functools.partial(torch_overlay.redistribute, given[OVERLAY], placements=whole)
    gather = _state_dict_utils._gather_state_dict
    return {
        "a tree made whole": {STOCK: one_by_one, OVERLAY: together},
        "a tree into tensors that are there": {STOCK: copied, OVERLAY: sync.run},
        "a full state dict, offloaded": {s: functools.partial(gather, given[s], cpu_offload=True) for s in SIDES},
    }


def _moved(mesh: Any) -> Callable[[Any], Any]:
    from torch.distributed.tensor import DTensor

    from .pairs import placements

    def moved(local: Any) -> Any:
        placed = DTensor.from_local(local, mesh, placements(("S0", "S1")), run_check=False)
        return placed.redistribute(mesh, placements(("S1", "S0"))).to_local() + 1

    return moved


def _compiled(meshes: dict[str, Any], device: str) -> Calls:
    import torch

    local, compiler = torch.ones(256, 256, device=device), "inductor" if device == "cuda" else "aot_eager"
    fast = {side: torch.compile(_moved(meshes[side]), backend=compiler, fullgraph=True) for side in SIDES}
    return {side: functools.partial(fast[side], local) for side in SIDES}


def _captured(meshes: dict[str, Any]) -> Calls:
    """Replays of a graph that was captured on each side."""
    import torch

    replays: Calls = {}
    for side in SIDES:
        graph, stream, local = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.ones(256, 256, device="cuda")
        with on(side):
            moved = _moved(meshes[side])
            with torch.cuda.stream(stream):
                for _ in range(3):
                    moved(local)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                moved(local)
        replays[side] = graph.replay
    return replays


def _seconds(calls: Calls, device: str, repeats: int) -> dict[str, float]:
    def one_call(side: str) -> float:
        with on(side):
            begun = _now(device)
            calls[side]()
            return _now(device) - begun

    return {side: median(seconds) for side, seconds in in_turns(one_call, repeats).items()}


def _peak_on(side: str, call: Callable[[], Any], device: str) -> int:
    with on(side):
        return peak(call, device)


def peak(call: Callable[[], Any], device: str) -> int:
    """The most bytes of a second call beyond what was there before it, its result included."""
    if device == "cpu":
        from .allocations import allocated

        return allocated([call])[0].peak
    import torch

    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
