"""What a redistribution takes: collectives and bytes of every pair of placements on a (2, 2, 2) mesh; no times.

Targets are replicas and shards of dims 0 and 1, sources these and pending sums; every set of axes is flattened on both
sides. Both planners are asked, nothing is sent. Bytes are those that the busiest rank of each collective gets.
"""

from __future__ import annotations

import argparse
import itertools

from .report import Report, Row, Target
from .sides import OVERLAY, SIDES, STOCK

MOVES, REDUCTIONS = "moves", "reductions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", type=int, nargs=2, default=[16, 16], metavar="N", help="of the float32 tensor")
    parser.add_argument("--device", default="cuda", help="of the mesh; on cpu stock gathers where it can't exchange")


def run(arguments: argparse.Namespace, report: Report) -> None:
    shape = tuple(arguments.shape)
    counted = [(source, target, counts(source, target, shape, arguments.device)) for source, target in pairs()]
    for kind in (MOVES, REDUCTIONS):
        some = [count for source, _, count in counted if ("P" in source) == (kind == REDUCTIONS)]
        for at, name, unit in ((0, "collectives", ""), (1, "bytes to the busiest rank", "B")):
            sums = (sum(count[side][at] for count in some) for side in SIDES)
            report.rows.append(Row(name, unit, *sums, {"pairs": f"{len(some)} {kind}"}))
    worse = [f"{source} -> {target}" for source, target, count in counted if count[OVERLAY][0] > count[STOCK][0]]
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

    mesh = typed.parse_mesh("2,2,2", None, None)
    ends = [typed.parse_placements(text, len(mesh.sizes)) for text in (source, target)]
    found = asked.of_words(ends, shape, torch.float32, mesh, None, Cost.of(device), None, device)
    assert found.stock is not None, (source, target)
    return {
        STOCK: (found.stock.collectives, found.stock.incoming),
        OVERLAY: (found.plan.collectives, found.plan.incoming),
    }
