"""A server that joins trainers: seconds until it has the first values, and what the trainers lose in that run.

On gloo ranks, without the overlay: FSDP on half of them, and servers of one rank each, of which the last one comes when
the others have had some runs. Many small tensors: what is planned counts, and not the bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from . import process
from .report import Report, Row

RUNS = 3  # before the last one comes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16], metavar="N")
    parser.add_argument("--tensors", type=int, nargs="+", default=[300, 9000], metavar="N", help="of 16 x 16 float32")


def run(arguments: argparse.Namespace, report: Report) -> None:
    for ranks in arguments.ranks:
        for tensors in arguments.tensors:
            print(f"joining: {ranks} ranks, {tensors} tensors", file=sys.stderr)
            figures = process.ranks("joining:measure", ranks, ranks=ranks, tensors=tensors)
            where = {"ranks": ranks, "tensors": tensors}
            report.rows.append(Row("join to first values", "s", None, figures["joined"], where))
            report.rows.append(Row("a trainer's run", "s", figures["before"], figures["during"], where))
    report.notes.append("of a trainer's run, stock is one in which nobody comes, and the other that which takes one in")


# --- on every rank


def measure(rank: int, ranks: int, tensors: int) -> dict[str, Any]:
    import socket

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import torch_overlay

    trainers, last, address = ranks // 2, ranks - 1, [""]
    if rank == 0:
        with socket.socket() as listens:
            listens.bind(("127.0.0.1", 0))
            address = [f"tcp://127.0.0.1:{listens.getsockname()[1]}"]
    dist.broadcast_object_list(address)
    names = [f"layers.{number}.weight" for number in range(tensors)]
    source, target = None, None if rank < trainers else {name: torch.zeros(16, 16) for name in names}
    if rank < trainers:
        mesh = DeviceMesh("cpu", [*range(trainers)])
        source = {name: distribute_tensor(torch.ones(16, 16), mesh, [Shard(0)], src_data_rank=None) for name in names}
        place = torch_overlay.meet(address[0], rank=rank, world_size=trainers, timeout=120, open=True)
        sync = torch_overlay.Transfer(source, None, group=place)
    dist.barrier()
    if trainers <= rank < last:
        place = torch_overlay.join(address[0], timeout=120)
        place.fleet.knock()  # so that the next run takes in all of them
    dist.barrier()
    runs, begun = [], time.perf_counter()
    if rank == last:
        dist.barrier()
        begun = time.perf_counter()
        sync = torch_overlay.Transfer(None, target, group=torch_overlay.join(address[0], timeout=120))
        sync.run()
        runs = [time.perf_counter() - begun]
    else:
        if rank >= trainers:
            sync = torch_overlay.Transfer(None, target, group=place)
        for _ in range(RUNS + 1):
            begun = time.perf_counter()
            sync.run()
            runs.append(time.perf_counter() - begun)
        dist.barrier()
        while not sync.joined or len(runs) == RUNS + 1:
            begun = time.perf_counter()
            sync.run()
            runs.append(time.perf_counter() - begun)
    joined = [runs[-1]]
    dist.broadcast_object_list(joined, src=last)
    sync.close()
    return {"joined": joined[0], "before": statistics.median(runs[1 : RUNS + 1] or runs), "during": runs[-1]}
