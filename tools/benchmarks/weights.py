"""Weights from a trainer's mesh to its servers: a `Transfer` beside what people write by hand.

On 8 gloo ranks, without the overlay: FSDP x TP on ranks 0 to 3, TP on 4 to 7; a Llama's weights, in bfloat16. All ways
run in the same processes, in turns, into the same targets; each is compared with the whole weights, bit by bit. CPU
time is that of all ranks. Ways by hand are planned before they are timed, as a `Transfer` is.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import TYPE_CHECKING, Any

from . import process
from .clock import seconds_of_all_ranks, summed
from .report import Report, Row, Target
from .sides import in_turns

if TYPE_CHECKING:
    from collections.abc import Callable

TRAIN, SERVE = range(4), range(4, 8)
OURS, KEEPING = "Transfer.run", "Transfer.run, buffers kept"
WAYS = ("gather, broadcast, cut", "one packed message a peer", "redistribute and copy", KEEPING, OURS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=24, metavar="N")
    parser.add_argument("--width", type=int, default=448, metavar="N", help="of the model; a multiple of 8")
    parser.add_argument("--rounds", type=int, default=3, help="of two turns, there and back through the ways")


def run(arguments: argparse.Namespace, report: Report) -> None:
    print(f"weights: {arguments.layers} layers of width {arguments.width}, 8 gloo ranks", file=sys.stderr)
    given = {"layers": arguments.layers, "width": arguments.width, "rounds": arguments.rounds}
    found = process.ranks("weights:measure", 8, **given)
    for what, unit in (("wall", "s"), ("cpu", "s"), ("collectives", "")):
        for way in WAYS[:-1]:
            report.rows.append(Row(f"{way}: {what}", unit, found[way][what], found[OURS][what], {"way": way}))
    report.facts["weights"] = found
    report.notes.append(f"{found['tensors']} tensors of {found['bytes'] / 1e6:.0f} MB; stock is the way by hand")
    report.targets.append(Target("wrong results", found["wrong"], 0))
    for way in WAYS[:-2]:
        report.targets.append(Target(f"wall of {way}", found[way]["wall"] / found[OURS]["wall"], 1, gain=True))


def shapes(layers: int, width: int) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Of each weight its shape and the dim that tensor parallelism cuts."""
    found: dict[str, tuple[tuple[int, ...], int | None]] = {"embed": ((8 * width, width), 0), "norm": ((width,), None)}
    for layer in range(layers):
        for name in "qkv":
            found[f"{layer}.{name}"] = (width, width), 0
        found |= {f"{layer}.o": ((width, width), 1), f"{layer}.down": ((width, 2 * width), 1)}
        found |= {f"{layer}.{name}": ((2 * width, width), 0) for name in ("gate", "up")}
        found |= {f"{layer}.norm{number}": ((width,), None) for number in (1, 2)}
    return found


# --- on every rank


def measure(rank: int, size: int, port: int, layers: int, width: int, rounds: int) -> dict[str, Any]:
    """Times and checks, as rank 0 sees them."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    whole = {}
    for number, (name, (shape, _)) in enumerate(shapes(layers, width).items()):
        whole[name] = torch.arange(torch.Size(shape).numel()).remainder(249 + number % 7).bfloat16().reshape(shape)
    with torch.no_grad():
        found = _measured(
            rank, whole, *_sides(whole, {n: dim for n, (_, dim) in shapes(layers, width).items()}), rounds
        )
    dist.destroy_process_group()
    return found


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
    found: dict[str, Any] = {"tensors": len(whole), "bytes": sum(t.nbytes for t in whole.values()), "wrong": 0}
    for way, call in ways.items():
        for each in target.values():
            each.to_local().zero_()
        with CommDebugMode() as counted:
            call()
        wrong = 0 if sends else sum(not _is_right(each, whole[name], rank) for name, each in target.items())
        found["wrong"] += int(summed(wrong))
        found[way] = {"collectives": counted.get_total_counts()}
    timed = in_turns(lambda way: seconds_of_all_ranks(ways[way]), rounds, ways, warm_up=False)  # counting warmed up
    for way, turns in timed.items():
        found[way] |= {clock: min(turn[clock] for turn in turns) for clock in ("wall", "cpu")}
    return found


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

    packed = _packed(_parts(source, target, rank), sends)
    return dict(zip(WAYS, (by_hand, packed, redistributed, keeping.run, sync.run)))


def _is_right(tensor: Any, whole: Any, rank: int) -> bool:
    import torch

    cut = tensor.placements[0]
    return torch.equal(tensor.to_local(), whole.chunk(4, cut.dim)[rank - 4] if cut.is_shard() else whole)


def _box(tensor: Any, at: int) -> list[tuple[int, int]]:
    """Start and end along each dim of what a place of the tensor's mesh has."""
    mesh, ends = tensor.device_mesh, [(0, length) for length in tensor.shape]
    coordinate = [int(each) for each in (mesh.mesh == at).nonzero()[0]]
    for place, axis, size in zip(coordinate, tensor.placements, mesh.shape):
        if axis.is_shard():
            low, high = ends[axis.dim]
            step = (high - low) // size
            ends[axis.dim] = low + place * step, low + (place + 1) * step
    return ends


def _parts(source: dict[str, Any], target: dict[str, Any], rank: int) -> dict[int, list[Any]]:
    """By the other rank, what of this rank's tensors it gets, or sends."""
    parts: dict[int, list[Any]] = {}
    for name in source:
        for sender, receiver in itertools.product(TRAIN, SERVE):
            if rank not in (sender, receiver):
                continue
            if not source[name].placements[1].is_shard() and sender % 2 != receiver % 2:
                continue  # replicas along TP share the servers
            have, want = _box(source[name], sender), _box(target[name], receiver)
            meets = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(have, want)]
            if all(low < high for low, high in meets):
                own, side = (have, source) if rank == sender else (want, target)
                view = side[name].to_local()
                for dim, ((low, high), (start, _)) in enumerate(zip(meets, own)):
                    view = view.narrow(dim, low - start, high - low)
                parts.setdefault(receiver if rank == sender else sender, []).append(view)
    return parts


def _packed(parts: dict[int, list[Any]], sends: bool) -> Callable[[], None]:
    """One message from each trainer to each server, packed by `torch.cat`."""
    import torch
    import torch.distributed as dist

    sizes = {peer: sum(view.numel() for view in views) for peer, views in parts.items()}

    def go() -> None:
        works, came = [], {}
        for peer, views in parts.items():
            if sends:
                works.append(dist.isend(torch.cat([view.reshape(-1) for view in views]), peer))
            else:
                came[peer] = torch.empty(sizes[peer], dtype=torch.bfloat16)
                works.append(dist.irecv(came[peer], peer))
        for work in works:
            work.wait()
        for peer, flat in came.items():
            for view, piece in zip(parts[peer], flat.split([view.numel() for view in parts[peer]])):
                view.copy_(piece.view(view.shape))

    return go
