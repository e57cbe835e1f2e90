"""What planning costs as ranks grow: first redistributions beside stock, the planner alone, transfers, and the store.

First redistributions run on the fake backend, each pair of placements once in a fresh process, for even and uneven
shards; the fewest CPU seconds of some processes count. The planner alone and transfers are asked without torch.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from typing import TYPE_CHECKING, Any

from . import process
from .report import Report, Row, Target
from .sides import OVERLAY, SIDES, STOCK, on

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_overlay.transfers._planner.schedule import Schedule

SIZES, SHAPES = (16, 16, 16), {"even": (16384, 16), "uneven": (20011, 17)}
MESHES = ((4, 4, 4), (16, 16, 16), (32, 32, 32), (48, 48, 48), (64, 64, 32))
SOURCES = (64, 512, 4096, 8192)
FIRST, ALONE = "first redistribution", "planner alone"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=50, help="of placements")
    parser.add_argument("--processes", type=int, default=3, help="a side")
    parser.add_argument("--questions", type=int, default=2000, help="drawn at random, for the planner alone")


def run(arguments: argparse.Namespace, report: Report) -> None:
    _first(arguments.pairs, arguments.processes, report)
    _alone(report)
    _drawn(arguments.questions, report)
    _transfers(report)


def _first(count: int, processes: int, report: Report) -> None:
    found: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    for _ in range(processes):
        for side in SIDES:
            print(f"growth: {count} pairs, {side}", file=sys.stderr)
            found[side].append(process.fresh("growth:first", side=side, count=count))
    best = {side: [min(times) for times in zip(*rounds)] for side, rounds in found.items()}
    slow = []
    for number, cut in enumerate(SHAPES):
        some = {side: best[side][number :: len(SHAPES)] for side in SIDES}
        for what, pick in (("median", lambda times: sorted(times)[len(times) // 2]), ("worst", max)):
            report.rows.append(Row(f"{FIRST}, {what}", "s", *[pick(some[side]) for side in SIDES], {"shards": cut}))
    for (pair, cut), stock, ours in zip(itertools.product(pairs(count), SHAPES), best[STOCK], best[OVERLAY]):
        if ours > max(2 * stock, 5e-3):
            slow.append(f"{_text(pair)}, {cut}: {ours * 1e3:.1f} ms, stock {stock * 1e3:.1f}")
    report.targets.append(Target("pairs above both twice stock's and 5 ms", len(slow), 0))
    report.notes += [f"slow: {each}" for each in slow]


def pairs(count: int) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Some of all pairs of placements on three axes, the same each time."""
    sources, targets = (itertools.product(codes, repeat=3) for codes in (("R", "P", "S0", "S1"), ("R", "S0", "S1")))
    every = list(itertools.product(sources, targets))
    return random.Random(0).sample([pair for pair in every if pair[0] != pair[1]], count)


def _text(pair: tuple[tuple[str, ...], tuple[str, ...]]) -> str:
    return " to ".join(",".join(end) for end in pair)


def first(side: str, count: int) -> list[float]:
    """CPU seconds of each pair's first redistribution on this side, with even and with uneven shards."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    from .fake_world import fake_world

    codes: dict[str, Placement] = {"R": Replicate(), "P": Partial(), "S0": Shard(0), "S1": Shard(1)}
    found = []
    with on(side), fake_world(0, math.prod(SIZES)), torch.no_grad():
        mesh = init_device_mesh("cpu", SIZES, mesh_dim_names=("a", "b", "c"))
        warm = DTensor.from_local(torch.ones(4096, 4), mesh, [Shard(0), Replicate(), Replicate()], run_check=False)
        warm.redistribute(placements=[Replicate()] * 3).to_local()
        for (source, target), shape in itertools.product(pairs(count), SHAPES.values()):
            before, after = ([codes[code] for code in end] for end in (source, target))
            held, _ = compute_local_shape_and_global_offset(torch.Size(shape), mesh, before)
            strides = torch.empty(shape, device="meta").stride()
            tensor = DTensor.from_local(
                torch.ones(held), mesh, before, run_check=False, shape=torch.Size(shape), stride=strides
            )
            begun = time.thread_time()
            tensor.redistribute(placements=after).to_local()
            found.append(time.thread_time() - begun)
    return found


def _seconds(call: Callable[[], Any], times: int = 3) -> float:
    best = math.inf
    for _ in range(times):
        begun = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begun)
    return best


def planning(
    source: tuple[str, ...], target: tuple[str, ...], shape: tuple[int, ...], sizes: tuple[int, ...], groups: Any
) -> Callable[[], Any]:
    """What plans one question, without torch."""
    from torch_overlay.distributed.tensor._planner.plan import plan
    from torch_overlay.distributed.tensor._planner.regions import Regions

    ends = []
    for codes in (source, target):
        dims = [int(code[1:]) if code[0] == "S" else None for code in codes]
        ends.append((dims, ["sum" if code == "P" else None for code in codes]))
    return lambda: plan(*[Regions.of(*end, shape, sizes) for end in ends], 4, groups)


def _alone(report: Report) -> None:
    """All pairs on three axes, uneven, with the groups that a mesh has by default."""
    for sizes in MESHES:
        asked = pairs(1700)[::4]
        times = sorted(_seconds(planning(*pair, (1000003, 33), sizes, [(0, 1, 2)])) for pair in asked)
        where = {"ranks": math.prod(sizes)}
        report.rows.append(Row(f"{ALONE}, median of {len(asked)} pairs", "s", None, times[len(times) // 2], where))
        report.rows.append(Row(f"{ALONE}, worst", "s", None, times[-1], where))


def _drawn(count: int, report: Report) -> None:
    """Questions at random, on meshes of 1,000 to 131,072 ranks."""
    rng, times = random.Random(5), []
    while len(times) < count:
        sizes = tuple(rng.choices((2, 3, 4, 6, 8, 16, 24, 32, 48, 64, 128), k=rng.randint(1, 5)))
        if not 1000 <= math.prod(sizes) <= 131_072:
            continue
        shape = tuple(rng.choice((rng.randint(1, 5000), rng.randint(1, 2_000_000))) for _ in range(rng.randint(1, 3)))
        cuts = ["R", *[f"S{dim}" for dim in range(len(shape))] * 2]
        source, target = (tuple(rng.choices(codes, k=len(sizes))) for codes in ([*cuts, "P", "P"], cuts))
        groups = rng.choice(([], [tuple(range(len(sizes)))], None))
        times.append(_seconds(planning(source, target, shape, sizes, groups)))
    times.sort()
    report.targets.append(
        Target(f"99th percentile of {count} random questions, ms", times[-(count // 100) - 1] * 1e3, 30)
    )


def _transfers(report: Report) -> None:
    """200 tensors of eight shapes, from FSDP over many ranks to TP over eight: a source's and a target's part."""
    found = {}
    for ranks in SOURCES:
        for rank, name in ((0, "source"), (ranks, "target")):
            schedule = transfer(ranks, rank)
            pieces = sum(len(item.tensors) for each in schedule[:2] for s in each.values() for item in s.items)
            found[name, ranks] = _seconds(lambda: transfer(ranks, rank), 2), pieces  # noqa: B023
            laid = _seconds(lambda: (schedule.packed(0, 1), schedule.landed(0, 1)), 2)  # noqa: B023
            where = {"ranks": ranks, "pieces": pieces}
            report.rows.append(Row(f"plan of a transfer's {name}", "s", None, found[name, ranks][0], where))
            report.rows.append(Row(f"its messages, {name}", "s", None, laid, where))
    report.targets.append(Target("plan of a target at 8,192 ranks, s", found["target", SOURCES[-1]][0], 0.5))
    flat = found["source", SOURCES[-1]][0] / found["source", SOURCES[0]][0]
    report.targets.append(Target("plan of a source, 8,192 ranks over 64", flat, 2))


def transfer(ranks: int, rank: int) -> Schedule:
    """One rank's part."""
    from torch_overlay.distributed.tensor._planner.regions import Regions
    from torch_overlay.transfers._planner.routes import Move
    from torch_overlay.transfers._planner.schedule import Schedule
    from torch_overlay.transfers._planner.sides import Ranks, Side

    trainers, servers = Ranks.of(range(ranks), (ranks,)), Ranks.of(range(ranks, ranks + 8), (8,))
    moves = []
    for number in range(200):
        shape = (8192 + number % 8 * 8, 8192)
        source, target = (Regions.of((dim,), (None,), shape, size) for dim, size in ((0, (ranks,)), (1, (8,))))
        moves.append(Move(Side(source, trainers), Side(target, servers), 2))
    return Schedule.of(moves, rank)
