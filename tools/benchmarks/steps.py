"""A training step without a sync, with one in front of it, and with one behind it.

On 8 gloo ranks, without the overlay: FSDP2 and AdamW on ranks 0 to 3, an MLP of some layers in float32; servers on 4 to
7 that hold a quarter of each weight in bfloat16. The three kinds of step run in turns in the same processes. Times are
those of the slowest trainer, medians over all steps; the last sync is waited for within the time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from . import process
from .report import Report, Row, Target

KINDS = ("no sync", "run() before the step", "behind the step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=8, metavar="N")
    parser.add_argument("--width", type=int, default=512, metavar="N", help="of the model; a multiple of 4")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="in a trainer's batch")
    parser.add_argument("--rounds", type=int, default=5, help="of four steps of each kind")


def run(arguments: argparse.Namespace, report: Report) -> None:
    print(f"steps: {arguments.layers} layers of width {arguments.width}, 8 gloo ranks", file=sys.stderr)
    sizes = {name: getattr(arguments, name) for name in ("layers", "width", "tokens", "rounds")}
    found = process.ranks("steps:measure", 8, **sizes)
    alone, front, behind = (found[kind] for kind in KINDS)
    report.rows.append(Row("a step and its sync: one after the other, beside at once", "s", front, behind))
    report.facts["steps"] = found
    report.notes.append(
        f"without a sync a step takes {alone:.4f} s: {front / alone:.2f} and {behind / alone:.2f} of it"
    )
    report.notes.append(
        f"{found['bytes'] / 1e6:.1f} MB of weights; the ranks share the cores, and nothing is hidden for free"
    )
    report.targets.append(Target("wrong results", found["wrong"], 0))


# --- on every rank


def measure(rank: int, size: int, port: int, layers: int, width: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of a step by kind, as rank 0 sees them; what came last is compared with the trainer's weights."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import torch_overlay

    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    train, serve = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [4, 5, 6, 7])
    trainer, source, target = None, None, None
    if rank < 4:
        trainer = _Trainer(train, rank, layers, width, tokens)
        source = dict(trainer.model.named_parameters())
    else:
        shape = torch.zeros(width, width, dtype=torch.bfloat16)
        target = {
            f"{layer}.weight": distribute_tensor(shape, serve, [Shard(0)], src_data_rank=None)
            for layer in range(0, 2 * layers, 2)
        }
    spent: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with torch_overlay.Transfer(source, target) as sync:
        for kind in [*KINDS, *reversed(KINDS)] * (2 * rounds):
            dist.barrier()
            begun = time.perf_counter()
            work = None
            if kind != KINDS[0]:
                work = sync.run(async_op=kind == KINDS[2], snapshot=kind == KINDS[2])
            if trainer is not None:
                trainer.step()
            if work is not None:
                work.wait()
            seconds = torch.tensor(time.perf_counter() - begun if rank < 4 else 0.0, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            spent[kind].append(seconds.item())
        sync.run()
    found: dict[str, Any] = {kind: statistics.median(times[2:] or times) for kind, times in spent.items()}
    found |= {"wrong": _wrong(source, target, width, layers), "bytes": 2 * layers * width * width}
    dist.destroy_process_group()
    return found


class _Trainer:
    def __init__(self, mesh: Any, rank: int, layers: int, width: int, tokens: int) -> None:
        import torch
        from torch import nn
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width, bias=False), nn.GELU())]
        self.model = nn.Sequential(*parts)
        for layer in (*self.model[::2], self.model):
            fully_shard(layer, mesh=mesh).set_force_sum_reduction_for_comms(True)  # gloo has no average
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(tokens, width, generator=torch.Generator().manual_seed(rank))

    def step(self) -> None:
        (self.model(self.batch) - self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.reshard()


def _wrong(source: Any, target: Any, width: int, layers: int) -> int:
    """How many of the servers' weights aren't the trainer's."""
    import torch
    import torch.distributed as dist

    wrong = torch.zeros((), dtype=torch.int64)
    for layer in range(0, 2 * layers, 2):
        whole = torch.empty(width, width)
        if source is not None:
            whole = source[f"{layer}.weight"].detach().full_tensor()
        dist.broadcast(whole, 0)
        if target is not None:
            wrong += not torch.equal(target[f"{layer}.weight"].full_tensor(), whole.bfloat16())
    dist.all_reduce(wrong)
    return int(wrong)
