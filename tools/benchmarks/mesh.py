"""Meshes from 64 to 1,048,576 ranks: what a view costs, in time and bytes, and what building the mesh costs.

Fake backend, mesh (W / 64, 8, 8), a rank in the middle. Each side and size has a process of its own, so no cache is
shared; `init_device_mesh` is repeated on a world that is destroyed and made again. Times are CPU times, medians.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tracemalloc
from typing import Any

from . import clock, process
from .report import Report, Row, Target
from .sides import OVERLAY, SIDES, STOCK, on

WORLDS, LARGEST = (64, 4096, 65536), 1_048_576
AXES, VIEW = ("a", "b", "c"), ("b", "c")
PARTS = ("slice", "hash", "equality", "coordinate", "get_group")
TOTAL = "view (all five)"
SIZE, INIT = "bytes of a view", "init_device_mesh"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worlds", type=int, nargs="+", default=list(WORLDS), metavar="W", help="multiples of 64")
    parser.add_argument("--full", action="store_true", help=f"{LARGEST:,} ranks besides (minutes, 3 GB)")
    parser.add_argument("--repeats", type=int, default=5)


def run(arguments: argparse.Namespace, report: Report) -> None:
    worlds = sorted({*arguments.worlds, *([LARGEST] if arguments.full else [])})
    if any(world % 64 or world < 64 for world in worlds):
        raise SystemExit(f"bench mesh: worlds must be multiples of 64, got {worlds}")
    for world in worlds:
        figures = {}
        for side in SIDES:
            print(f"mesh: {side}, {world:,} ranks", file=sys.stderr)
            figures[side] = process.fresh("mesh:measure", side=side, world=world, repeats=arguments.repeats)
        for name in (*PARTS, TOTAL, SIZE, INIT):
            unit = "B" if name == SIZE else "s"
            report.rows.append(Row(name, unit, figures[STOCK][name], figures[OVERLAY][name], {"ranks": world}))
        report.facts[str(world)] = {side: figures[side]["facts"] for side in SIDES}
    report.targets += targets(report, worlds)
    report.notes += notes(report, worlds)


def targets(report: Report, worlds: list[int]) -> list[Target]:
    """What issue 2 asks of the largest mesh; the ratios mean nothing on a small one, so it must be the million."""
    goals = [Target(f"bytes of a view, {worlds[-1]:,} ranks", report.row(SIZE, ranks=worlds[-1]).overlay, 16 * 1024)]
    if len(worlds) > 1:
        first, last = (report.row(TOTAL, ranks=world).overlay for world in (worlds[0], worlds[-1]))
        goals.append(Target(f"overlay's view, {worlds[-1]:,} ranks over {worlds[0]:,}", last / first, 2.0))
    if worlds[-1] == LARGEST:
        view, init = report.row(TOTAL, ranks=LARGEST), report.row(INIT, ranks=LARGEST)
        goals.append(Target("view at a million ranks, times faster", view.gain or 0, 200, gain=True))
        goals.append(Target("init at a million ranks, times faster", init.gain or 0, 4, gain=True))
    return goals


def notes(report: Report, worlds: list[int]) -> list[str]:
    facts = report.facts[str(worlds[-1])]
    calls = ", ".join(f"{side} {facts[side]['new_group_calls']:,}" for side in SIDES)
    return [
        "CPU time of one thread, medians; a view: slice, hash, equality with another like it, coordinate, group",
        "bytes are Python's (tracemalloc), of a view that has answered all five; tensors' memory is not in them",
        f"init_device_mesh ran in full on both sides; new_group calls on this rank at {worlds[-1]:,}: {calls}",
    ]


def measure(side: str, world: int, repeats: int) -> dict[str, Any]:
    import torch.distributed.tensor  # noqa: F401 - as in a program that has DTensors

    from .fake_world import fake_world

    with on(side):
        with fake_world(5, 64):  # first calls import and fill what is no part of the size
            _view_parts(_mesh(64), 2)
        inits, figures = [], {}
        for turn in range(repeats):
            with fake_world(world // 2 + 5, world):
                seconds, calls, mesh = _init(world)
                inits.append(seconds)
                if turn == 0:
                    figures = _views(mesh, repeats)
                del mesh
            gc.collect()
            if sum(inits) > 30:  # the median of fewer, rather than minutes
                break
    figures[INIT] = clock.median(inits)
    figures["facts"] |= {"init_repeats": len(inits), "new_group_calls": calls}
    return figures


def _mesh(world: int):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (world // 64, 8, 8), mesh_dim_names=AXES)


def _init(world: int):
    import time

    from .fake_world import GroupCounter

    with GroupCounter() as counter:
        begun = time.thread_time()
        mesh = _mesh(world)
        return time.thread_time() - begun, counter.calls, mesh


def _views(mesh, repeats: int) -> dict[str, Any]:
    _view_parts(mesh, 2)  # building the mesh has emptied the processor's caches
    # Blocks of 20 ms are long against the clock's own cost.
    count = max(2, min(200, round(0.02 / max(sum(_view_parts(mesh, 2).values()), 1e-9))))
    blocks = [_view_parts(mesh, count) for _ in range(max(repeats, 7))]
    figures: dict[str, Any] = {part: clock.median(block[part] for block in blocks) for part in PARTS}
    figures[TOTAL] = clock.median(sum(block.values()) for block in blocks)
    figures[SIZE] = _bytes(mesh, min(count, 20))
    figures["facts"] = {"views_a_block": count, "blocks": len(blocks)}
    return figures


def _view_parts(mesh, count: int) -> dict[str, float]:
    """CPU seconds a view, by part, over `count` new views and as many others that are equal to them."""
    others = [mesh[VIEW] for _ in range(count)]
    seconds = {}
    seconds["slice"], views = clock.each(lambda _: mesh[VIEW], range(count))
    if any(view is other for view, other in zip(views, others)):
        raise RuntimeError("a slice returned the same object twice: equality would cost nothing")
    seconds["hash"], _ = clock.each(hash, views)
    seconds["equality"], same = clock.each(lambda pair: pair[0] == pair[1], zip(views, others))
    seconds["coordinate"], at = clock.each(lambda view: view.get_coordinate(), views)
    seconds["get_group"], _ = clock.each(lambda view: view.get_group(VIEW[0]), views)
    if not all(same) or None in at:
        raise RuntimeError("equal views compared unequal, or a rank of the mesh has no coordinate")
    return seconds


def _bytes(mesh, count: int) -> float:
    """Python bytes that one view holds once it has answered everything."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        views = [mesh[VIEW] for _ in range(count)]
        for view in views:
            hash(view), view == views[0], view.get_coordinate(), view.get_group(VIEW[0])
        return (tracemalloc.get_traced_memory()[0] - before) / count
    finally:
        tracemalloc.stop()
