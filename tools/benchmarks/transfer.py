"""Many parameters made whole: a loop of ``full_tensor()`` on stock torch, and one call for all of them.

On 8 gloo ranks, a mesh of (4, 2) with its flattened view, parameters of mixed shapes, types and placements; a size is
that of one whole parameter. Both sides in the same processes, in turns; every result is compared with the loop's, bit
by bit. A `Transfer` that was made before is a row by itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from . import process
from .report import Report, Row, Target
from .sides import OVERLAY, SIDES, STOCK, TURNS, on

if TYPE_CHECKING:
    from collections.abc import Callable

KB, MB = 1 << 10, 1 << 20
SIZES = (8 * KB, 64 * KB, 4 * MB)
AGAIN = "Transfer.run"
GAINS = {8 * KB: 5, 64 * KB: 5, 4 * MB: 1.5}  # that issue 15 asks for
TYPES = ("float32", "bfloat16", "float32", "int64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="BYTES")
    parser.add_argument("--parameters", type=int, default=340, metavar="N")
    parser.add_argument("--most", type=int, default=256 * MB, metavar="BYTES", help="all whole parameters of a size")
    parser.add_argument("--rounds", type=int, default=2, help="of four turns: stock, overlay, overlay, stock")


def run(arguments: argparse.Namespace, report: Report) -> None:
    ranks = 8
    counts = {size: max(1, min(arguments.parameters, arguments.most // size)) for size in arguments.sizes}
    print(f"transfer: {counts} parameters by bytes, {ranks} gloo ranks", file=sys.stderr)
    found = process.ranks("transfer:measure", ranks, counts=list(counts.items()), rounds=arguments.rounds)
    for one in found:
        size, count, seconds = one["bytes"], one["parameters"], one["seconds"]
        where = {"bytes": size}
        report.rows.append(Row(f"{count} parameters, time", "s", seconds[STOCK], seconds[OVERLAY], where))
        report.rows.append(Row(f"{count} parameters, by {AGAIN}", "s", seconds[STOCK], seconds[AGAIN], where))
        report.rows.append(Row(f"{count} parameters, collectives", "", *[one["collectives"][s] for s in SIDES], where))
        report.targets.append(Target(f"{size:,} bytes: collectives", one["collectives"][OVERLAY], 4))
        report.targets.append(Target(f"{size:,} bytes: wrong results", one["wrong"], 0))
        if size in GAINS:
            gain = seconds[STOCK] / seconds[OVERLAY]
            report.targets.append(Target(f"{size:,} bytes: times faster", gain, GAINS[size], gain=True))
    report.facts["sizes"] = found
    report.notes.append("time: from barrier to barrier on rank 0, all parameters, the best turn; planning included")


# --- on every rank


def measure(rank: int, size: int, port: int, counts: list[tuple[int, int]], rounds: int) -> list[dict[str, Any]]:
    """Times, checks and counts at every size, as rank 0 sees them (wrong: as any rank does)."""
    import torch
    import torch.distributed as dist

    from . import pairs

    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    meshes = {}
    for side in SIDES:
        with on(side):
            meshes[side] = pairs.flattened_mesh((4, 2))
    with torch.no_grad():
        found = [_one_size(meshes, in_bytes, count, rounds) for in_bytes, count in counts]
    dist.destroy_process_group()
    return found


def _one_size(meshes: dict, size: int, count: int, rounds: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import CommDebugMode

    import torch_overlay

    trees = {side: parameters(meshes[side], size, count) for side in SIDES}
    with on(OVERLAY):
        target = torch_overlay.redistribute(trees[OVERLAY], placements=_whole())
        again = torch_overlay.Transfer(trees[OVERLAY], target)
    calls: dict[str, tuple[str, Callable[[], Any]]] = {
        STOCK: (STOCK, lambda: {name: each.full_tensor() for name, each in trees[STOCK].items()}),
        OVERLAY: (OVERLAY, lambda: torch_overlay.redistribute(trees[OVERLAY], placements=_whole())),
        AGAIN: (OVERLAY, again.run),
    }
    counted, results = {}, {}
    for side in SIDES:
        with on(side), CommDebugMode() as counts:
            results[side] = calls[side][1]()
        counted[side] = counts.get_total_counts()
    wrong = sum(not torch.equal(results[STOCK][name], results[OVERLAY][name].to_local()) for name in trees[STOCK])
    every = torch.tensor(wrong)
    dist.all_reduce(every)
    del results
    best = dict.fromkeys(calls, float("inf"))
    for what in [*TURNS, AGAIN] * rounds:
        side, call = calls[what]
        with on(side):
            best[what] = min(best[what], _seconds(call))
    again.close()
    return {"bytes": size, "parameters": count, "wrong": int(every), "collectives": counted, "seconds": best}


def _seconds(call: Callable[[], Any]) -> float:
    import torch.distributed as dist

    call()
    dist.barrier()
    begun = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - begun


def _whole() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def parameters(mesh: Any, size: int, count: int) -> dict[str, Any]:
    """Parameters of one size in bytes, of different shapes, types and placements; the same on every rank."""
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    ends = [(Shard(0), Shard(1)), (Shard(0), Replicate()), (Shard(0), Shard(0)), (Shard(1), Shard(0))]
    found = {}
    for number in range(count):
        dtype = getattr(torch, TYPES[number % len(TYPES)])
        elements = size // dtype.itemsize
        rows = 1 << (elements.bit_length() // 2 + number % 3 - 1)
        whole = (torch.arange(elements) % 251 + number).to(dtype).view(rows, -1)
        found[f"p{number}"] = distribute_tensor(whole, mesh, ends[number // 4 % 4], src_data_rank=None)
    return found
