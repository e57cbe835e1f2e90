"""What a redistribution takes: collectives and bytes of every pair of placements on a (2, 2, 2) mesh; no times.

Targets are replicas and shards of dims 0 and 1, sources these and pending sums; every set of axes is flattened on both
sides. Both planners are asked, nothing is sent. Bytes are those that the busiest rank of each collective gets.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from .report import Report, Row, Target
from .sides import OVERLAY, SIDES, STOCK

SIZES = (2, 2, 2)
MOVES, REDUCTIONS = "moves", "reductions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", type=int, nargs=2, default=[16, 16], metavar="N", help="of the float32 tensor")
    parser.add_argument("--device", default="cuda", help="of the mesh; on cpu stock gathers where it can't exchange")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each Nth pair")


def run(arguments: argparse.Namespace, report: Report) -> None:
    shape = tuple(arguments.shape)
    chosen = pairs()[:: arguments.every]
    found = [(source, target, counts(source, target, shape, arguments.device)) for source, target in chosen]
    for kind in (MOVES, REDUCTIONS):
        some = [count for source, _, count in found if ("P" in source) == (kind == REDUCTIONS)]
        report.facts[kind] = {side: _by_number([count[side][0] for count in some]) for side in SIDES}
        for at, what, unit in ((0, "collectives", ""), (1, "bytes to the busiest rank", "B")):
            sums = (sum(count[side][at] for count in some) for side in SIDES)
            report.rows.append(Row(what, unit, *sums, {"pairs": f"{len(some)} {kind}"}))
    worse = [f"{source} -> {target}" for source, target, count in found if count[OVERLAY][0] > count[STOCK][0]]
    report.targets.append(Target("pairs in which the overlay takes more collectives than stock", len(worse), 0))
    report.notes.append(
        f"{shape[0]}x{shape[1]} float32, (2,2,2) mesh of {arguments.device}, all views flattened on both sides"
    )
    report.notes += [f"more collectives: {pair}" for pair in worse]


def pairs() -> list[tuple[str, str]]:
    """702 moves and 999 reductions, as `explain` writes them.

    >>> len(pairs()), pairs()[0], pairs()[-1]
    (1701, ('R,R,R', 'R,R,S0'), ('P,P,P', 'S1,S1,S1'))
    """
    sources, targets = ([",".join(some) for some in itertools.product(codes, repeat=3)] for codes in (_SOURCE, _TARGET))
    return [(source, target) for source in sources for target in targets if source != target]


_TARGET = ("R", "S0", "S1")
_SOURCE = (*_TARGET, "P")


def counts(source: str, target: str, shape: tuple[int, int], device: str) -> dict[str, tuple[int, int]]:
    """(collectives, bytes that the busiest rank gets) by side."""
    import torch

    from torch_overlay.distributed.tensor._planner.cost import Cost
    from torch_overlay.show import asked, typed

    mesh = typed.Mesh(SIZES, ("a", "b", "c"))
    flattened = [axes for count in (2, 3) for axes in itertools.combinations(range(3), count)]
    ends = [typed.placements(text, len(SIZES)) for text in (source, target)]
    held, groups = typed.held(ends, shape, SIZES), None
    cost = Cost.of(device)
    found = asked.of_words(ends, held, shape, torch.float32, mesh, device, flattened, groups, cost)
    sides = dict(zip(SIDES, (found.torch, found.overlay)))
    for plan in sides.values():
        if plan.lines and plan.incoming is None:
            raise ValueError(f"{plan.name} has a step whose bytes aren't known: {plan.lines}")
    return {side: (plan.collectives, plan.incoming or 0) for side, plan in sides.items()}


def _by_number(collectives: list[int]) -> dict[str, int]:
    """How many pairs take no collective, one, two, ..."""
    return {str(number): collectives.count(number) for number in range(max(collectives) + 1)}


def draw(report: Report, figure: Any, colors: list[str], ink: str) -> None:
    """Bars of how many pairs take no collective, one, two or more: a bar a side, moves above reductions."""
    panels = figure.subplots(2, 1)
    for axes, kind in zip(panels, (MOVES, REDUCTIONS)):
        rows = {row.name: row for row in report.rows if kind in row.where["pairs"]}
        for line, side in enumerate(SIDES):
            left = 0
            for number, count in report.facts[kind][side].items():
                color = colors[min(int(number), len(colors) - 1)]
                axes.barh(line, count, left=left, height=0.72, color=color, edgecolor="white")
                if count > 40:
                    axes.text(left + count / 2, line, str(count), ha="center", va="center", color=_on(number, ink))
                left += count
        count, size = rows["collectives"], rows["bytes to the busiest rank"]
        axes.set_yticks(range(2), ["stock", "overlay"], fontsize=12)
        axes.invert_yaxis()
        axes.set_xlim(0, left)
        axes.xaxis.set_visible(False)
        axes.tick_params(axis="y", length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        fewer = f"{count.gain:.1f} times fewer collectives, {size.gain:.1f} times fewer bytes to the busiest rank"
        axes.set_title(f"{count.where['pairs']}: {fewer}", loc="left", fontsize=12)


def _on(number: str, ink: str) -> str:
    return ink if int(number) < 2 else "white"
