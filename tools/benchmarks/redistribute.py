"""Redistribution by size, from 1 KB to 64 MB, on 8 gloo ranks over a fixed set of pairs of placements.

Both sides in the same processes, in turns, on meshes with the same flattened views. A size is that of the whole
tensor in float32. Every result is compared with the whole tensor cut by hand. A time is wall time, the best of several
batches; a pair that comes out slower than stock is measured up to three times more, both sides.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from typing import TYPE_CHECKING, Any

from . import clock, process
from .report import Report, Row, Target
from .sides import OVERLAY, SIDES, STOCK, in_turns, on
from .table import shown

if TYPE_CHECKING:
    from .pairs import Pair

KB, MB = 1 << 10, 1 << 20
SIZES = (KB, 16 * KB, 256 * KB, MB, 16 * MB, 64 * MB)
MOVES, REDUCTIONS = "moves", "with a reduction"
AGAIN = 3  # more turns for a pair that came out slower than stock: one that something else held up gets faster
HELD = (MB, 16 * MB)  # where issue 3 asks for twice the speed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="BYTES")
    parser.add_argument("--pairs", type=int, default=None, metavar="N", help="only the first N of the fixed set")
    parser.add_argument("--only", default="", metavar="TEXT", help="only pairs with this in them: 'P,P,S0 -> S0'")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N random moves in place of the fixed set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1, help="of four turns: stock, overlay, overlay, stock")
    parser.add_argument("--batches", type=int, default=2, help="timed batches a turn")


def run(arguments: argparse.Namespace, report: Report) -> None:
    from . import pairs

    ranks = 8
    which = dict(count=arguments.pairs, only=arguments.only, random=arguments.random, seed=arguments.seed)
    chosen = choose(ranks, **which)
    if not chosen:
        raise SystemExit(f"bench redistribute: no pair of the set has {arguments.only!r} in it")
    for size in arguments.sizes:
        pairs.shape_of(size)
    print(f"redistribute: {len(chosen)} pairs, {len(arguments.sizes)} sizes, {ranks} gloo ranks", file=sys.stderr)
    how = dict(sizes=arguments.sizes, which=which, rounds=arguments.rounds, batches=arguments.batches)
    rows = report.facts["pairs"] = process.ranks("redistribute:measure", ranks, **how)
    for size in arguments.sizes:
        _add_rows(report, [one for one in rows if one["bytes"] == size], size)
    _add_counts(report, rows)
    report.notes.append("time: from barrier to barrier on rank 0, by call, best batch; mean: geometric")


def choose(ranks: int, count: int | None, only: str, random: int, seed: int) -> list[Pair]:
    from . import pairs

    known = pairs.random_moves(random, seed, ranks) if random else pairs.fixed(ranks)
    return [pair for pair in known if only in str(pair)][:count]


def _add_rows(report: Report, rows: list[dict[str, Any]], size: int) -> None:
    where = {"bytes": size}
    for kind in (MOVES, REDUCTIONS):
        times = [one["seconds"] for one in rows if one["move"] == (kind == MOVES)]
        if times:
            means = (clock.geometric_mean(one[side] for one in times) for side in SIDES)
            report.rows.append(Row(f"{kind}, mean of {len(times)}", "s", *means, where))
            if kind == MOVES and size in HELD:
                gain = report.rows[-1].gain or 0
                report.targets.append(Target(f"{size // MB} MB, {kind}, times faster", gain, 2, gain=True))
    slowest = max(rows, key=lambda one: one["seconds"][OVERLAY] / one["seconds"][STOCK])
    seconds = slowest["seconds"]
    report.rows.append(Row("worst pair", "s", seconds[STOCK], seconds[OVERLAY], where))
    report.notes.append(f"worst at {shown(size, 'B')}: {slowest['pair']}")
    if size in HELD:
        gain = seconds[STOCK] / seconds[OVERLAY]
        report.targets.append(
            Target(f"{size // MB} MB, worst ({slowest['pair']}), times faster", gain, 0.91, gain=True)
        )


def _add_counts(report: Report, rows: list[dict[str, Any]]) -> None:
    """Collectives that a rank ran, each pair once at each size, and how many results were wrong on any rank."""
    for kind in (MOVES, REDUCTIONS):
        some = [one for one in rows if one["move"] == (kind == MOVES)]
        counts = (sum(one["collectives"][side] for one in some) for side in SIDES)
        if some:
            report.rows.append(Row(f"collectives of {len(some)} {kind}", "", *counts))
    wrong = {side: [one for one in rows if one["wrong"][side]] for side in SIDES}
    report.rows.append(Row(f"wrong results of {len(rows)}", "", *(len(wrong[side]) for side in SIDES)))
    report.targets.append(Target("wrong results, overlay", len(wrong[OVERLAY]), 0))
    for side in SIDES:
        report.notes += [f"{side}: wrong at {one['bytes']:,} bytes: {one['pair']}" for one in wrong[side]]


# --- on every rank


def measure(rank: int, sizes: list[int], which: dict[str, Any], rounds: int, batches: int) -> Any:
    """Times, checks and counts of every pair at every size, as rank 0 sees them (wrong: as any rank does)."""
    import torch
    import torch.distributed as dist

    from . import pairs

    chosen = choose(dist.get_world_size(), **which)
    meshes = {}
    for side in SIDES:
        with on(side):
            meshes[side] = {sizes: pairs.flattened_mesh(sizes) for sizes in dict.fromkeys(p.sizes for p in chosen)}
    rows = []
    with torch.no_grad():
        for size_in_bytes in sizes:
            rows += one_size(chosen, meshes, size_in_bytes, rounds, batches)
    return rows


def one_size(chosen: list, meshes: dict, size: int, rounds: int, batches: int) -> list[dict[str, Any]]:
    """Pair by pair, the sides in turns, so that what else the machine does is as bad for both."""
    from . import pairs

    best = {(pair, side): float("inf") for pair in chosen for side in SIDES}
    facts: dict = {}

    def one_turn(pair: Pair, side: str) -> float:
        mesh = meshes[side][pair.sizes]
        source = pairs.source_tensor(pair, mesh, pairs.shape_of(size))
        with on(side):
            if (pair, side) not in facts:
                facts[pair, side] = _check(pair, source, mesh)
            calls = calls_of(size, local=not facts[pair, STOCK][1])
            return _best_batch(source, mesh, pairs.placements(pair.target), calls, batches)

    again = list(chosen)
    for count in [rounds] + [1] * AGAIN:
        for pair in again:
            # Each turn warms up by itself, and stock's first counts the collectives by which the overlay's is as long.
            for side, seconds in in_turns(functools.partial(one_turn, pair), count, warm_up=False).items():
                best[pair, side] = min(best[pair, side], *seconds)
        again = _agreed([pair for pair in again if best[pair, OVERLAY] > best[pair, STOCK]])
    return [
        {
            "bytes": size,
            "pair": str(pair),
            "move": pair.is_move,
            "seconds": {side: best[pair, side] for side in SIDES},
            "wrong": {side: facts[pair, side][0] for side in SIDES},
            "collectives": {side: facts[pair, side][1] for side in SIDES},
        }
        for pair in chosen
    ]


def _agreed(pairs: list) -> list:
    import torch.distributed as dist

    said = [pairs]
    dist.broadcast_object_list(said)
    return said[0]


def calls_of(size: int, local: bool = False) -> int:
    """Calls in a batch, the same on every rank: enough to drown the barrier, and more where nothing is sent."""
    return max(4, min(32, 32 * MB // size)) * (16 if local else 1)


def _check(pair, source, mesh) -> tuple[bool, int]:
    """(whether any rank got a wrong result, collectives that rank 0 ran)."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import CommDebugMode

    from . import pairs

    with CommDebugMode() as counted:
        result = source.redistribute(mesh, pairs.placements(pair.target))
    expected = pairs.local_target(pair, tuple(mesh.get_coordinate()), tuple(source.shape))
    wrong = torch.tensor(int(not torch.equal(result.to_local().cpu(), expected)), device=mesh.device_type)
    dist.all_reduce(wrong)
    return bool(wrong), counted.get_total_counts()


def _best_batch(source, mesh, target, calls: int, batches: int) -> float:
    import torch.distributed as dist

    source.redistribute(mesh, target)  # the first of a turn plans and allocates
    best = float("inf")
    for _ in range(batches):
        settle(mesh.device_type)
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(calls):
            source.redistribute(mesh, target).to_local()
        settle(mesh.device_type)
        dist.barrier()
        best = min(best, (time.perf_counter() - begun) / calls)
    return best


def settle(device: str) -> None:
    """Wait until the device has done what it was given; a CPU always has."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
