"""Only what changed: a `Transfer` with `changes` beside one that sends everything.

On 8 gloo ranks, without the overlay: FSDP on ranks 0 to 3, TP on 4 to 7, in bfloat16. Before each turn a share of the
elements is changed at random. All ways run in the same processes, in turns, and every result is compared with the whole
tensors, bit by bit. CPU time is that of all ranks.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from . import process
from .clock import seconds_of_all_ranks, summed
from .report import Report, Row, Target
from .sides import in_turns

TRAIN, SERVE = range(4), range(4, 8)
WHOLE = "everything, without changes"
SHARES = (0.1, 1.0, 10.0, 50.0)  # percent
FULL = "100 % changed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensors", type=int, default=32, metavar="N")
    parser.add_argument("--rows", type=int, default=1024, metavar="N", help="of a tensor of 1,024 columns")
    parser.add_argument("--rounds", type=int, default=3, help="of two turns, there and back through the ways")


def run(arguments: argparse.Namespace, report: Report) -> None:
    given = {"tensors": arguments.tensors, "rows": arguments.rows, "rounds": arguments.rounds}
    print(f"changes: {arguments.tensors} tensors of {arguments.rows} x 1024 bfloat16, 8 gloo ranks", file=sys.stderr)
    figures = process.ranks("changes:measure", 8, **given)
    for name, unit in (("bytes", "B"), ("wall", "s"), ("cpu", "s")):
        for way in figures["ways"]:
            report.rows.append(Row(name, unit, figures[WHOLE][name], figures[way][name], {"way": way}))
    report.facts["changes"] = figures
    report.notes.append(f"{figures['size'] / 1e6:.0f} MB; stock is a Transfer that sends everything")
    report.targets.append(Target("wrong results", figures["wrong"], 0))
    few = figures[_name(SHARES[0])]
    report.targets.append(Target("bytes, 0.1 % changed", few["bytes"] / figures[WHOLE]["bytes"], 0.01))
    report.targets.append(Target("wall, 0.1 % changed", few["wall"] / figures[WHOLE]["wall"], 0.35))
    one = figures[_name(SHARES[1])]
    report.targets.append(Target("bytes, 1 % changed", one["bytes"] / figures[WHOLE]["bytes"], 0.05))
    report.targets.append(Target("wall, all changed", figures[FULL]["wall"] / figures[WHOLE]["wall"], 1.25))


def _name(share: float) -> str:
    return f"{share:g} % changed"


# --- on every rank


def measure(rank: int, tensors: int, rows: int, rounds: int) -> dict[str, Any]:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import torch_overlay

    random = torch.Generator().manual_seed(0)
    whole = torch.randint(-(1 << 15), 1 << 15, (tensors, rows, 1024), generator=random, dtype=torch.int16)
    train, serve = (DeviceMesh("cpu", [*ranks]) for ranks in (TRAIN, SERVE))

    def sides(mesh: Any, cut: int, values: Any) -> list[Any]:
        return [distribute_tensor(each, mesh, [Shard(cut)], src_data_rank=None) for each in values]

    source = sides(train, 0, whole.view(torch.bfloat16))
    targets = [sides(serve, 1, torch.zeros_like(whole).view(torch.bfloat16)) for _ in range(2)]
    trains = rank in TRAIN
    syncs = [
        torch_overlay.Transfer(source if trains else None, None if trains else target, keep=True, changes=changes)
        for target, changes in zip(targets, (False, True))
    ]
    ways = {WHOLE: 100.0, **{_name(share): share for share in SHARES}, FULL: 100.0}
    figures: dict[str, Any] = {"ways": [*ways], "size": whole.nbytes, "wrong": 0}
    for way in ways:
        figures[way] = {"bytes": whole.nbytes}
    for sync in syncs:
        sync.run()

    def change(share: float) -> None:
        count = int(whole.numel() * share / 100)
        places = torch.randint(whole.numel(), (count,), generator=random) if share < 100 else slice(None)
        whole.view(-1)[places] += 1
        for each, values in zip(source, whole.view(torch.bfloat16)):
            if trains:
                each.to_local().copy_(values.chunk(4)[rank])

    def turn(way: str) -> dict[str, float]:
        is_whole = way == WHOLE
        change(ways[way])
        sync = syncs[not is_whole]
        clocks = seconds_of_all_ranks(sync.run)
        if not is_whole:
            figures[way]["bytes"] = int(summed(sync.sent_bytes))
        wrong = 0
        for each, values in zip(targets[not is_whole], whole) if not trains else ():
            wrong += not torch.equal(each.to_local().view(torch.int16), values.chunk(4, 1)[rank - 4])
        figures["wrong"] += int(summed(wrong))
        return clocks

    for way, turns in in_turns(turn, rounds, ways).items():
        figures[way] |= {clock: min(each[clock] for each in turns) for clock in ("wall", "cpu")}
    return figures
