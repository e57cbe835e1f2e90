"""What one redistribute call costs the CPU where nothing moves: fake backend, small tensors, 1 to 4 axes.

`hit` is a call that was made before, `miss` one with a shape that was not seen before, which may take over the plan of
other shapes. Both sides in one process, in turns, on
meshes with the same flattened views. CPU time, the median over blocks.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from . import clock, process
from .report import Report, Row, Target
from .sides import OVERLAY, SIDES, STOCK, in_turns, on

KINDS = HIT, MISS = "plan hit", "plan miss"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--axes", type=int, nargs="+", default=[1, 2, 3, 4], metavar="N", help="meshes of 2 ** N ranks")
    parser.add_argument("--calls", type=int, default=50, help="calls in a block of hits")
    parser.add_argument("--rounds", type=int, default=4, help="of four turns: stock, overlay, overlay, stock")


def run(arguments: argparse.Namespace, report: Report) -> None:
    for axes in arguments.axes:
        print(f"overhead: {axes} axes", file=sys.stderr)
        how = dict(axes=axes, calls=arguments.calls, rounds=arguments.rounds)
        figures = report.facts[str(axes)] = process.fresh("overhead:measure", **how)
        for kind in KINDS:
            _add_rows(report, figures, kind, axes)
    report.notes.append(
        "CPU time by call of DTensor.redistribute, autograd off; mean: geometric, over the pairs of a mesh"
    )


def _add_rows(report: Report, pairs: dict[str, Any], kind: str, axes: int) -> None:
    where = {"axes": axes}
    means = [clock.geometric_mean(pair[kind][side] for pair in pairs.values()) for side in SIDES]
    report.rows.append(Row(f"{kind}, mean", "s", *means, where))
    name, worst = max(pairs.items(), key=lambda item: item[1][kind][OVERLAY] / item[1][kind][STOCK])
    report.rows.append(Row(f"{kind}, worst pair", "s", worst[kind][STOCK], worst[kind][OVERLAY], where))
    report.notes.append(f"{kind}, worst of {len(pairs)} pairs: {name}")
    report.targets.append(Target(f"{kind}, {axes} axes, times faster", means[0] / means[1], 1, gain=True))


def patterns(axes: int) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:

    def turning(*codes: str) -> tuple[str, ...]:
        return tuple(codes[axis % len(codes)] for axis in range(axes))

    pairs = [
        (turning("S0"), turning("R")),
        (turning("R"), turning("S0")),
        (turning("S0"), turning("S1")),
        (turning("P"), turning("R")),
        (turning("P"), turning("S0")),
    ]
    if axes > 1:
        pairs += [(turning("S0", "S1"), turning("S1", "S0")), (turning("P", "S0"), turning("R", "S1"))]
    return pairs


# --- in a process of its own


def measure(axes: int, calls: int, rounds: int) -> dict[str, Any]:
    import torch

    from . import pairs
    from .fake_world import fake_world

    sizes = (2,) * axes
    chosen = [pairs.Pair(sizes, source, target) for source, target in patterns(axes)]
    with fake_world(2**axes // 2, 2**axes), torch.no_grad():
        meshes = {}
        for side in SIDES:
            with on(side):
                meshes[side] = pairs.flattened_mesh(sizes)
        # The smallest that the axes can cut evenly, none met twice. Copies of large ones would count, too.
        known = [(16 * a, 16 * b, c) for a in range(1, 9) for b in range(1, 9) for c in range(1, 33)]
        shapes = iter(sorted(known, key=math.prod)[1:])  # the first is the one of the hits

        def all_pairs(side: str) -> dict[str, dict[str, float]]:
            new = [next(shapes) for _ in range(_MISSES)]
            with on(side):
                return {str(pair): _one_turn(pair, meshes[side], calls, new) for pair in chosen}

        turns = in_turns(all_pairs, rounds)
    return {
        str(pair): {
            kind: {side: clock.median(one[str(pair)][kind] for one in turns[side]) for side in SIDES} for kind in KINDS
        }
        for pair in chosen
    }


_MISSES = 8


def _one_turn(pair, mesh, calls: int, shapes: list[tuple[int, ...]]) -> dict[str, float]:
    from .pairs import placements

    target = placements(pair.target)
    hit = _source(pair, mesh, (16, 16, 1))
    for _ in range(3):
        hit.redistribute(mesh, target)
    seconds = {HIT: clock.each(lambda _: hit.redistribute(mesh, target), range(calls))[0]}
    new = [_source(pair, mesh, shape) for shape in shapes]
    seconds[MISS] = clock.each(lambda source: source.redistribute(mesh, target), new)[0]
    return seconds


def _source(pair, mesh, whole: tuple[int, ...]):
    import torch
    from torch.distributed.tensor import DTensor

    from .pairs import placements

    shape = list(whole)
    for code, size in zip(pair.source, pair.sizes):
        if code.startswith("S"):
            shape[int(code[1:])] //= size
    strides = (whole[1] * whole[2], whole[2], 1)
    local = torch.zeros(shape)
    return DTensor.from_local(local, mesh, placements(pair.source), run_check=False, shape=whole, stride=strides)
