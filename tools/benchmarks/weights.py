"""Weights from a trainer's mesh to its servers: a `Transfer` beside what people write by hand.

On 8 gloo ranks, without the overlay: FSDP x TP on ranks 0 to 3, TP on 4 to 7; a Llama's weights, in bfloat16. All ways
run in the same processes, in turns, into the same targets; each is compared with the whole weights, bit by bit, but
for a bare all-to-all of the same bytes, which is what the wire takes. CPU time is that of all ranks. Ways by hand are
planned before they are timed, as a `Transfer` is.
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

TRAIN, SERVE = range(4), range(4, 8)
OURS, KEEPING, BARE = "Transfer.run", "Transfer.run, buffers kept", "a bare all-to-all, which packs nothing"
BY_HAND = ("gather, broadcast, cut", "redistribute and copy")
WAYS = (*BY_HAND, BARE, KEEPING, OURS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=24, metavar="N")
    parser.add_argument("--width", type=int, default=448, metavar="N", help="of the model; a multiple of 8")
    parser.add_argument("--rounds", type=int, default=3, help="of two turns, there and back through the ways")


def run(arguments: argparse.Namespace, report: Report) -> None:
    print(f"weights: {arguments.layers} layers of width {arguments.width}, 8 gloo ranks", file=sys.stderr)
    given = {"layers": arguments.layers, "width": arguments.width, "rounds": arguments.rounds}
    figures = process.ranks("weights:measure", 8, **given)
    for name, unit in (("wall", "s"), ("cpu", "s"), ("collectives", "")):
        for way in WAYS[:-1]:
            report.rows.append(Row(name, unit, figures[way][name], figures[OURS][name], {"way": way}))
    report.facts["weights"] = figures
    report.notes.append(f"{figures['tensors']} tensors of {figures['bytes'] / 1e6:.0f} MB; stock is the other way")
    report.targets.append(Target("wrong results", figures["wrong"], 0))
    for way in BY_HAND:
        report.targets.append(Target(f"wall of {way}", figures[way]["wall"] / figures[OURS]["wall"], 1, gain=True))


def shapes(layers: int, width: int) -> dict[str, tuple[tuple[int, ...], int | None]]:
    cuts: dict[str, tuple[tuple[int, ...], int | None]] = {"embed": ((8 * width, width), 0), "norm": ((width,), None)}
    for layer in range(layers):
        for name in "qkv":
            cuts[f"{layer}.{name}"] = (width, width), 0
        cuts |= {f"{layer}.o": ((width, width), 1), f"{layer}.down": ((width, 2 * width), 1)}
        cuts |= {f"{layer}.{name}": ((2 * width, width), 0) for name in ("gate", "up")}
        cuts |= {f"{layer}.norm{number}": ((width,), None) for number in (1, 2)}
    return cuts


# --- on every rank


def measure(rank: int, layers: int, width: int, rounds: int) -> dict[str, Any]:
    import torch

    whole = {}
    for number, (name, (shape, _)) in enumerate(shapes(layers, width).items()):
        whole[name] = torch.arange(torch.Size(shape).numel()).remainder(249 + number % 7).bfloat16().reshape(shape)
    cuts = {name: dim for name, (_, dim) in shapes(layers, width).items()}
    with torch.no_grad():
        return _measured(rank, whole, *_sides(whole, cuts), rounds)


def _sides(whole: dict[str, Any], cuts: dict[str, int | None]) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    train = DeviceMesh("cpu", torch.tensor(TRAIN).reshape(2, 2), mesh_dim_names=("fsdp", "tp"))
    serve = DeviceMesh("cpu", [*SERVE], mesh_dim_names=("tp",))
    source, target = {}, {}
    for name, values in whole.items():
        cut = Replicate() if cuts[name] is None else Shard(cuts[name])
        source[name] = distribute_tensor(values, train, [Shard(0), cut], src_data_rank=None)
        target[name] = distribute_tensor(torch.zeros_like(values), serve, [cut], src_data_rank=None)
    return source, target


def _measured(
    rank: int, whole: dict[str, Any], source: dict[str, Any], target: dict[str, Any], rounds: int
) -> dict[str, Any]:
    from torch.distributed.tensor.debug import CommDebugMode

    sends = rank in TRAIN
    ways = _ways(rank, whole, source, target)
    figures: dict[str, Any] = {"tensors": len(whole), "bytes": sum(t.nbytes for t in whole.values()), "wrong": 0}
    for way, call in ways.items():
        for each in target.values() if way != BARE else ():
            each.to_local().zero_()
        with CommDebugMode() as counted:
            call()
        wrong = (
            0 if sends or way == BARE else sum(not _is_right(each, whole[name], rank) for name, each in target.items())
        )
        figures["wrong"] += int(summed(wrong))
        figures[way] = {"collectives": counted.get_total_counts()}
    timed = in_turns(lambda way: seconds_of_all_ranks(ways[way]), rounds, ways, warm_up=False)  # counting warmed up
    for way, turns in timed.items():
        figures[way] |= {clock: min(turn[clock] for turn in turns) for clock in ("wall", "cpu")}
    return figures


def _ways(
    rank: int, whole: dict[str, Any], source: dict[str, Any], target: dict[str, Any]
) -> dict[str, Callable[[], Any]]:
    import torch
    import torch.distributed as dist

    import torch_overlay

    sends, between = rank in TRAIN, dist.new_group([0, *SERVE])
    serve = next(iter(target.values())).device_mesh
    own = (source, None) if sends else (None, target)
    sync, keeping = (torch_overlay.Transfer(*own, keep=keeps) for keeps in (False, True))

    def by_hand() -> None:
        for name, each in source.items():
            full = each.full_tensor() if sends else torch.empty_like(whole[name])
            if not rank or not sends:
                dist.broadcast(full, 0, group=between)
            if not sends:
                cut = target[name].placements[0]
                target[name].to_local().copy_(full.chunk(4, cut.dim)[rank - 4] if cut.is_shard() else full)

    def redistributed() -> None:
        new = torch_overlay.redistribute(source, serve, lambda name, _: target[name].placements)
        for name, each in new.items() if not sends else ():
            target[name].to_local().copy_(each.to_local())

    return dict(zip(WAYS, (by_hand, redistributed, _bare(sync), keeping.run, sync.run)))


def _bare(transfer: Any) -> Callable[[], Any]:
    """The bytes that go from rank to rank in a transfer, in buffers that are there."""
    import torch
    import torch.distributed as dist

    sent, rank = transfer._flow().sent, dist.get_rank()
    ranks = range(dist.get_world_size())
    out, into = ([sent[pair] for pair in pairs] for pairs in zip(*[((rank, n), (n, rank)) for n in ranks]))
    given, came = (torch.zeros(sum(sizes), dtype=torch.uint8) for sizes in (out, into))
    return lambda: dist.all_to_all_single(came, given, into, out)


def _is_right(tensor: Any, whole: Any, rank: int) -> bool:
    import torch

    cut = tensor.placements[0]
    return torch.equal(tensor.to_local(), whole.chunk(4, cut.dim)[rank - 4] if cut.is_shard() else whole)
