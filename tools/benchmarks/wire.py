"""A `Transfer` with `keep=True` beside a bare all-to-all of the same bytes, which packs and checks nothing.

On 8 gloo ranks, without the overlay: shards of rows on ranks 0 to 3, into shards of rows (every other tensor) or of
columns on ranks 4 to 7, in bfloat16. Both run in the same processes, in turns; every result is checked. CPU time is
that of all ranks.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from . import process
from .clock import seconds_of_all_ranks, summed
from .report import Report, Row, Target
from .sides import in_turns

if TYPE_CHECKING:
    from collections.abc import Callable

BARE, KEEPING, PLAIN = "all-to-all", "keep=True", "keep=False"
CASES = {  # how many, of which shape; the most times that a run may take as long as the bare all-to-all
    "8 of 8 MB": (8, (2048, 2048), 1.5),
    "300 of 256 KB": (300, (512, 256), 1.7),
    "1000 of 16 KB": (1000, (128, 64), 3.0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=10, help="of two turns, there and back through the ways")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])


def run(arguments: argparse.Namespace, report: Report) -> None:
    print("wire: 8 gloo ranks", file=sys.stderr)
    found = process.ranks("wire:measure", 8, cases=arguments.cases, rounds=arguments.rounds)
    for name, times in found.items():
        for way in (KEEPING, PLAIN):
            for what in ("wall", "cpu"):
                report.rows.append(Row(f"{name}, {way}: {what}", "s", times[BARE][what], times[way][what]))
        ratio = times[KEEPING]["wall"] / times[BARE]["wall"]
        report.targets.append(Target(f"{name}, times the all-to-all", ratio, CASES[name][2]))
        report.targets.append(Target(f"{name}, wrong results", times["wrong"], 0))
    report.facts["wire"] = found
    report.notes.append("stock is the all-to-all; the least of all turns, since other work on the machine only adds")


# --- on every rank


def measure(rank: int, size: int, port: int, cases: list[str], rounds: int) -> dict[str, Any]:
    """Times and checks by case, as rank 0 sees them."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    with torch.no_grad():
        found = {name: _case(rank, size, *CASES[name][:2], rounds) for name in cases}
    dist.destroy_process_group()
    return found


def _case(rank: int, size: int, count: int, shape: tuple[int, int], rounds: int) -> dict[str, Any]:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    import torch_overlay

    half = size // 2
    meshes = [DeviceMesh("cpu", [*ranks], mesh_dim_names=("dp",)) for ranks in (range(half), range(half, size))]
    source, target, wanted = {}, {}, {}
    for number in range(count):
        whole = (torch.arange(shape[0] * shape[1]) * (number + 1)).remainder(251).bfloat16().reshape(shape)
        dim, name = number % 2, str(number)
        if rank < half:
            source[name] = DTensor.from_local(whole.chunk(half)[rank].clone(), meshes[0], [Shard(0)], run_check=False)
        else:
            wanted[name] = whole.chunk(half, dim)[rank - half].clone()
            local = torch.zeros_like(wanted[name])
            target[name] = DTensor.from_local(local, meshes[1], [Shard(dim)], run_check=False)
    own = (source, None) if rank < half else (None, target)
    keeping, plain = (torch_overlay.Transfer(*own, keep=keeps) for keeps in (True, False))
    ways = {BARE: _bare(keeping, size), KEEPING: keeping.run, PLAIN: plain.run}
    found: dict[str, Any] = {"wrong": 0}
    for way in (KEEPING, PLAIN):
        for _ in range(2):
            for each in target.values():
                each.to_local().zero_()
            ways[way]()
            wrong = [not torch.equal(each.to_local(), wanted[name]) for name, each in target.items()]
            found["wrong"] += int(summed(sum(wrong)))
    timed = in_turns(lambda way: seconds_of_all_ranks(ways[way]), rounds, ways)
    for way, turns in timed.items():
        found[way] = {clock: min(turn[clock] for turn in turns) for clock in ("wall", "cpu")}
    keeping.close(), plain.close()
    return found


def _bare(transfer: Any, size: int) -> Callable[[], Any]:
    """The bytes that go from rank to rank in a transfer, in buffers that are there."""
    import torch
    import torch.distributed as dist

    sent = transfer._flow().sent
    rank = dist.get_rank()
    out, into = ([sent[pair] for pair in pairs] for pairs in zip(*[((rank, n), (n, rank)) for n in range(size)]))
    given, came = (torch.zeros(sum(sizes), dtype=torch.uint8) for sizes in (out, into))
    return lambda: dist.all_to_all_single(came, given, into, out)
