"""What the cases share: work in several threads at once, and redistributions whose every number is known."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from way import STOCK

JOIN_SECONDS = 30
ELEMENTS = 64
DEVICE = "cpu"  # where tensors and meshes are; a stage of tools/one_gpu.py says cuda:0
R, P = Replicate(), Partial()


def at_once(*works: Callable[[], None]) -> None:
    """Run these together, the first in this thread; AssertionError with what went wrong in any of them."""
    problems: list[str] = []
    together = threading.Barrier(len(works), timeout=JOIN_SECONDS)

    def run(work: Callable[[], None]) -> None:
        try:
            if DEVICE != "cpu":
                torch.accelerator.set_device_index(torch.device(DEVICE).index)  # a thread begins with the first
            together.wait()
            work()
        except BaseException:  # a thread's error would only be printed
            problems.append(traceback.format_exc())

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works[1:]]
    for thread in threads:
        thread.start()
    run(works[0])
    for thread in threads:
        thread.join(JOIN_SECONDS)
    problems += [f"a thread didn't end in {JOIN_SECONDS} s" for thread in threads if thread.is_alive()]
    assert not problems, "\n".join(problems)


def number(who: int, rank: int, step: int) -> float:
    """What this rank brings to a sum; no two users, ranks or steps bring the same. Sums of them are exact."""
    return float(who * 100_000 + step * 100 + 2**rank)


def all_right(results: list[tuple[torch.Tensor, float]]) -> None:
    """Each tensor is filled with its number."""
    wrong = [(tensor.flatten()[0].item(), value) for tensor, value in results if not torch.all(tensor == value)]
    assert not wrong, f"{len(wrong)} of {len(results)} wrong, the first: {wrong[0][0]} instead of {wrong[0][1]}"


def reduce_metric(who: int, times: int) -> None:
    """All-reduces on the default group, as trainers do for their metrics."""
    rank, results = dist.get_rank(), []
    for step in range(times):
        metric = torch.full((ELEMENTS,), number(who, rank, step), dtype=torch.float64, device=DEVICE)
        dist.all_reduce(metric)
        results.append((metric, sum(number(who, other, step) for other in range(dist.get_world_size()))))
    all_right(results)


def held_by_this_process() -> dict[str, int]:
    """Its threads, open files and memory that isn't shared, in bytes."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[5])
    threads, files = (len(os.listdir(f"/proc/self/{folder}")) for folder in ("task", "fd"))
    return {"threads": threads, "files": files, "bytes": pages * os.sysconf("SC_PAGE_SIZE")}


def reduce(mesh: DeviceMesh, source, who: int, times: int, first=lambda given: given) -> None:
    """Sums over the axes whose placement is partial, to replicas; `source` has a placement for each axis. `first` is an
    operation that comes before and changes no number."""
    ranks, rank, results = summed_ranks(mesh, source), dist.get_rank(), []
    for step in range(times):
        local = torch.full((ELEMENTS,), number(who, rank, step), dtype=torch.float64, device=DEVICE)
        given = first(DTensor.from_local(local, mesh, source, run_check=False))
        total = given.redistribute(placements=[R] * mesh.ndim)
        assert given.device_mesh is mesh and total.device_mesh is mesh  # another's groups may give the same numbers
        results.append((total.to_local(), sum(number(who, other, step) for other in ranks)))
    all_right(results)


def summed_ranks(mesh: DeviceMesh, source) -> list[int]:
    """The ranks of the mesh that sit where this one does on every axis that isn't summed."""
    here = mesh.get_coordinate()
    where = tuple(slice(None) if placement.is_partial() else at for placement, at in zip(source, here))
    return mesh.mesh[where].flatten().tolist()


def private() -> contextlib.AbstractContextManager:
    """`torch_overlay.private_groups()`; stock needs no such thing, for there all groups are private."""
    if STOCK:
        return contextlib.nullcontext()
    import torch_overlay

    return torch_overlay.private_groups()


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """A folder that all ranks see, removed once all have left. Uses the default group on entering and on leaving."""
    with contextlib.ExitStack() as stack:
        name = [stack.enter_context(tempfile.TemporaryDirectory()) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(name)
        yield name[0]
        dist.barrier()
