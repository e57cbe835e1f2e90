"""All meshes of a run from its degrees, by ParallelDims and by torchtitan's class, at 64, 4,096 and 65,536 ranks.

One rank on the fake backend, each class, side and size in a process of its own. CPU time of one build; Python memory at
its peak; calls for groups, and groups that are open after it. torchtitan's class is measured where it can be imported.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import sys
import time
import tracemalloc
from typing import Any

from . import clock, process
from .report import Report, Row, Target
from .sides import OVERLAY, SIDES, on

NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
# torchtitan's recipe for a mixture of experts, and larger ones of its kind: by ranks, degrees in the order of NAMES.
DEGREES = {64: (2, 2, 4, 2, 2, 8), 4096: (4, 8, 16, 2, 4, 32), 65536: (16, 32, 16, 2, 4, 32)}
OURS, TITAN = "ParallelDims", "torchtitan"
BUILD, PEAK, CALLS, GROUPS = "build", "memory, peak", "new_group calls", "groups"
UNITS = {BUILD: "s", PEAK: "B", CALLS: "", GROUPS: ""}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worlds", type=int, nargs="+", choices=DEGREES, default=list(DEGREES), metavar="W")
    parser.add_argument("--stock-most", type=int, default=4096, metavar="W", help="ranks up to which stock is measured")
    parser.add_argument("--repeats", type=int, default=5)


def run(arguments: argparse.Namespace, report: Report) -> None:
    for world in sorted(set(arguments.worlds)):
        for maker in (OURS, TITAN):
            found = {}
            for side in SIDES if world <= arguments.stock_most else (OVERLAY,):
                print(f"dims: {maker} on {side}, {world:,} ranks", file=sys.stderr)
                found[side] = process.fresh(
                    "dims:measure", side=side, maker=maker, world=world, repeats=arguments.repeats
                )
            if "missing" in found[OVERLAY]:
                _note(report, f"torchtitan isn't measured: {found[OVERLAY]['missing']}")
                continue
            for name, unit in UNITS.items():
                stock, overlay = (found[side][name] if side in found else None for side in SIDES)
                report.rows.append(Row(name, unit, stock, overlay, {"ranks": world, "class": maker}))
            if maker == OURS:
                report.facts[str(world)] = {"ranks of its groups": found[OVERLAY]["own"]}
    _judge(report, arguments)


def _judge(report: Report, arguments: argparse.Namespace) -> None:
    worlds = sorted(set(arguments.worlds))
    for world in worlds:
        calls = report.row(CALLS, ranks=world, **{"class": OURS}).overlay
        # Nine sets of several ranks, and this rank alone for etp, which is 1.
        report.targets.append(Target(f"new_group calls of a rank, {world:,} ranks", calls or 0, 11))
    if {4096, 65536} <= set(worlds):
        small, large = (_bytes_a_rank(report, world) for world in (4096, 65536))
        report.targets.append(Target("bytes for each rank of its groups, 65,536 over 4,096 ranks", large / small, 1.25))
    own = ", ".join(f"{report.facts[str(world)]['ranks of its groups']:,} at {world:,}" for world in worlds)
    report.notes += [
        f"ranks of a rank's own groups, the world's left out: {own}",
        "memory is Python's (tracemalloc), of one build after another was there; CPU time of one thread, medians",
        "the classes differ in what they make: torchtitan's makes a mesh more, and some groups that can't communicate",
    ]
    if worlds[-1] > arguments.stock_most:
        report.notes.append(f"stock isn't measured beyond {arguments.stock_most:,} ranks: --stock-most")


def _bytes_a_rank(report: Report, world: int) -> float:
    peak = report.row(PEAK, ranks=world, **{"class": OURS}).overlay
    return (peak or 0) / report.facts[str(world)]["ranks of its groups"]


def _note(report: Report, text: str) -> None:
    if text not in report.notes:
        report.notes.append(text)


def measure(side: str, maker: str, world: int, repeats: int) -> dict[str, Any]:
    """One class on one side at one size, in this process; why not, where it can't be imported."""
    try:
        build = ours if maker == OURS else titan()
    except Exception as error:  # whatever another library's import says
        return {"missing": f"{type(error).__name__}: {error}".partition("\n")[0]}
    from .fake_world import GroupCounter, fake_world

    with on(side):
        with fake_world(5, 64):  # the first calls import and fill what is no part of the size
            build(64)
        seconds: list[float] = []
        for _ in range(repeats):
            with fake_world(world // 3, world), GroupCounter() as counter:
                begun = time.thread_time()
                built = build(world)
                seconds.append(time.thread_time() - begun)
                groups = counter.open()
                del built
            if sum(seconds) > 30:  # the median of fewer, rather than minutes
                break
        with fake_world(world // 3, world):
            peak = _peak(build, world)
    own = sum(len(ranks) for ranks in set(groups))
    return {BUILD: clock.median(seconds), PEAK: peak, CALLS: counter.calls, GROUPS: len(groups), "own": own}


def _peak(build: Any, world: int) -> int:
    """Bytes of Python memory at the most while it builds."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = build(world)
        peak = tracemalloc.get_traced_memory()[1]
        del kept
        return peak
    finally:
        tracemalloc.stop()


def ours(world: int) -> Any:
    from torch_overlay.parallel_dims import ParallelDims

    return ParallelDims(**dict(zip(NAMES, DEGREES[world]))).build("cpu")


def titan() -> Any:
    """Its class's build, on the CPU as its own tests do it. Raises what its import raises."""
    room: Any = importlib.import_module("torchtitan.distributed.parallel_dims")
    room.device_type = "cpu"
    logging.disable(logging.INFO)  # it says what it builds

    def build(world: int) -> Any:
        dims = room.ParallelDims(**dict(zip(NAMES, DEGREES[world])), world_size=world)
        dims.build_mesh()
        return dims

    return build
