"""Transfers beside their limits: bare collectives of the same bytes, runs again, and requests to the store.

On 8 gloo ranks, without the overlay; all ways in the same processes, in turns. CPU time is that of all ranks. Bytes are
counted where the backend gets them.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import hashlib
import json
import sys
import zlib
from typing import TYPE_CHECKING, Any

from . import process
from .clock import of_all_ranks, summed
from .report import Report, Row, Target

if TYPE_CHECKING:
    from collections.abc import Callable

MANY, LARGE = "1,000 tensors of 16 KB", "one tensor of 64 MB"
BARE, RUN, KEPT, AGAIN = "bare all-to-all", "Transfer.run", "with buffers kept", "redistribute(device_mesh=)"
MEETINGS = (8, 512, 4096)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensors", type=int, default=1000, metavar="N", help="of 16 KB")
    parser.add_argument("--rounds", type=int, default=5, help="of two turns, there and back through the ways")


def run(arguments: argparse.Namespace, report: Report) -> None:
    print("limits: 8 gloo ranks", file=sys.stderr)
    found = process.ranks("limits:measure", 8, tensors=arguments.tensors, rounds=arguments.rounds)
    for what, ways in found["ways"].items():
        for way in (RUN, KEPT, AGAIN):
            report.rows.append(Row(f"{what}: {way}, CPU", "s", ways[BARE]["cpu"], ways[way]["cpu"], {"way": way}))
            report.rows.append(Row(f"{what}: {way}, wall", "s", ways[BARE]["wall"], ways[way]["wall"]))
    many, large = (found["ways"][what] for what in (MANY, LARGE))
    report.targets += [
        Target("wrong results", found["wrong"], 0),
        Target("bytes that a run hands to the backend, over the least", found["bytes"], 1.02),
        Target(f"{MANY}: CPU over that of a {BARE}", many[RUN]["cpu"] / many[BARE]["cpu"], 3),
        Target(f"{MANY}: {AGAIN} over {RUN}, CPU", many[AGAIN]["cpu"] / many[RUN]["cpu"], 2),
        Target(f"{LARGE}: CPU over that of a {BARE}", large[RUN]["cpu"] / large[BARE]["cpu"], 1.5),
        Target("requests of a rank to the store, 4,096 ranks over 8", requests(4096) / requests(8), 1),
    ]
    for ranks in MEETINGS:
        report.rows.append(Row("requests of a rank to the store", "", None, requests(ranks), {"ranks": ranks}))
    report.notes.append("stock: the bare all-to-all; nothing is packed, and nothing put in its place")


def requests(ranks: int) -> int:
    """How often a rank asks the store, where so many say what they have; only this one runs."""
    import torch.distributed as dist

    from torch_overlay.transfers.meeting import Meeting

    counts: collections.Counter[str] = collections.Counter()

    def counting(name: str) -> Callable[..., Any]:
        def call(self: Any, *given: Any) -> Any:
            counts[name] += 1
            return getattr(dist.HashStore, name)(self, *given)

        return call

    names = ("set", "get", "multi_get", "wait", "check", "add", "compare_set", "delete_key")
    store = type("Counting", (dist.HashStore,), {name: counting(name) for name in names})()
    meeting = Meeting(range(ranks), 0, store, datetime.timedelta(seconds=5), "A benchmark")
    for rank in range(1, ranks):
        said = zlib.compress(json.dumps(f"word {rank % 2}").encode())
        store.set(hashlib.sha256(said).hexdigest(), said)
        store.set(f"rank {rank}", hashlib.sha256(said).hexdigest())
    counts.clear()
    meeting.say("word 0")
    return counts.total()


# --- on every rank


def measure(rank: int, size: int, port: int, tensors: int, rounds: int) -> dict[str, Any]:
    """Times and checks, as rank 0 sees them."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    mesh, other = (DeviceMesh("cpu", torch.arange(size).roll(by)) for by in (0, 1))
    found: dict[str, Any] = {"ways": {}, "wrong": 0, "bytes": 0.0}
    with torch.no_grad():
        for what, count, shape in ((MANY, tensors, (64, 64)), (LARGE, 1, (4096, 4096))):
            _measure_one(found, what, [torch.randn(shape) for _ in range(count)], (mesh, other), rounds)
    dist.destroy_process_group()
    return found


def _measure_one(found: dict[str, Any], what: str, wholes: list[Any], meshes: tuple[Any, Any], rounds: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    import torch_overlay

    size, rank = dist.get_world_size(), dist.get_rank()
    for whole in wholes:
        dist.broadcast(whole, 0)
    source = [distribute_tensor(whole, meshes[0], [Shard(0)], src_data_rank=None) for whole in wholes]
    target = [distribute_tensor(whole * 0, meshes[1], [Shard(1)], src_data_rank=None) for whole in wholes]
    total = sum(whole.nbytes for whole in wholes)
    sent, came = (torch.zeros(total // size, dtype=torch.uint8) for _ in range(2))
    runs = {
        way: torch_overlay.Transfer(source, target, keep_buffers=keep) for way, keep in ((RUN, False), (KEPT, True))
    }
    ways: dict[str, Callable[[], Any]] = {
        BARE: lambda: dist.all_to_all_single(came, sent),
        **{way: sync.run for way, sync in runs.items()},
        AGAIN: lambda: torch_overlay.redistribute(source, meshes[1], [Shard(1)]),
    }
    for call in ways.values():
        call()
    counted = _bytes_handed(runs[RUN].run)
    found["bytes"] = max(found["bytes"], counted / (total / size * (size - 1) / size))
    place = (rank + 1) % size
    wrong = sum(not torch.equal(each.to_local(), whole.chunk(size, 1)[place]) for each, whole in zip(target, wholes))
    found["wrong"] += int(summed(wrong))
    found["ways"][what] = of_all_ranks(ways, rounds)
    for sync in runs.values():
        sync.close()


def _bytes_handed(call: Callable[[], Any]) -> float:
    """What this rank hands to the backend for others."""
    from unittest import mock

    import torch.distributed as dist

    handed, own, rank = [], dist.all_to_all_single, dist.get_rank()

    def swap(came: Any, packed: Any, into: Any, out: Any, **options: Any) -> Any:
        handed.append(len(packed) - out[rank])
        return own(came, packed, into, out, **options)

    group = dist.ProcessGroup
    send = group.send

    def sends(self: Any, tensors: Any, *given: Any) -> Any:
        handed.extend(each.nbytes for each in tensors)
        return send(self, tensors, *given)

    with mock.patch.object(dist, "all_to_all_single", swap), mock.patch.object(group, "send", sends):
        call()
    return float(sum(handed))
