"""Each element leaves the trainers once: a `Transfer` with `relay` beside one without.

On 8 gloo ranks, without the overlay: 25 tensors of 4 MB from ranks 0 and 1, cut by rows, to replicas on the other six.
Both run in the same processes, in turns; every result is checked.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from . import process
from .clock import seconds_of_all_ranks, summed
from .report import Report, Row, Target
from .sides import in_turns

DIRECT, RELAY = "without relay", "relay=True"
TRAINERS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensors", type=int, default=25, metavar="N", help="of 4 MB each")
    parser.add_argument("--rounds", type=int, default=5, help="of two turns, there and back through the ways")


def run(arguments: argparse.Namespace, report: Report) -> None:
    print(f"relay: {arguments.tensors} tensors of 4 MB, 8 gloo ranks", file=sys.stderr)
    figures = process.ranks("relay:measure", 8, tensors=arguments.tensors, rounds=arguments.rounds)
    for name in ("wall", "cpu"):
        report.rows.append(Row(name, "s", figures[DIRECT][name], figures[RELAY][name]))
    for name in ("out of the trainers", "out of the busiest rank"):
        report.rows.append(Row(name, "B", figures[DIRECT][name], figures[RELAY][name]))
    report.facts["relay"] = figures
    report.notes.append("stock is a Transfer without relay; the least of all turns")
    report.targets.append(Target("wrong results", figures["wrong"], 0))
    report.targets.append(Target("wall", figures[RELAY]["wall"] / figures[DIRECT]["wall"], 1.0))
    out = figures[RELAY]["out of the trainers"] / figures["size"]
    report.targets.append(Target("bytes out of the trainers", out, 1.0))


# --- on every rank


def measure(rank: int, tensors: int, rounds: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import torch_overlay

    train = DeviceMesh("cpu", [*range(TRAINERS)])
    whole = (torch.arange(tensors * (1 << 20)) % 65521).float().view(tensors, 1024, 1024)
    source = [distribute_tensor(each, train, [Shard(0)], src_data_rank=None) for each in whole]
    targets = [[torch.zeros_like(each) for each in whole] for _ in range(2)]
    trains = rank < TRAINERS
    ways, figures = (DIRECT, RELAY), dict[str, Any](size=whole.nbytes, wrong=0)
    syncs = {}
    for way, target in zip(ways, targets):
        given = (source, None) if trains else (None, target)
        syncs[way] = sync = torch_overlay.Transfer(*given, keep=True, relay=way == RELAY)
        sync.run()
        out = [sync.traffic[each][0] for each in range(dist.get_world_size())]
        figures[way] = {"out of the trainers": sum(out[:TRAINERS]), "out of the busiest rank": max(out)}
        wrong = 0 if trains else sum([not torch.equal(one, other) for one, other in zip(target, whole)])
        figures["wrong"] += int(summed(wrong))
    for way, turns in in_turns(lambda way: seconds_of_all_ranks(syncs[way].run), rounds, ways).items():
        figures[way] |= {clock: min(each[clock] for each in turns) for clock in ("wall", "cpu")}
    return figures
