"""Peak memory of a redistribution beyond its source, over all pairs of placements on a (2, 2, 2) mesh.

Both sides on meshes with the same flattened views, in one process that plays one rank of a fake world: what a
collective returns is allocated there as well. Counted by the events of torch's allocator, the result included. A size
is that of the whole tensor in float32.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
import sys
import warnings
from typing import TYPE_CHECKING, Any

from . import clock, process
from .report import Report, Row, Target
from .sides import OVERLAY, SIDES, STOCK, on

if TYPE_CHECKING:
    from .allocations import Memory
    from .pairs import Pair

SIZES = (2, 2, 2)
MOVES, REDUCTIONS = "moves", "with a reduction"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=16 << 20, metavar="BYTES")
    parser.add_argument("--rank", type=int, default=0, help="of 8: the one whose memory is counted")
    parser.add_argument("--only", default="", metavar="TEXT", help="only pairs with this in them: 'P,P,S0 -> S0'")


def run(arguments: argparse.Namespace, report: Report) -> None:
    print(f"memory: all pairs on {SIZES}, rank {arguments.rank} of 8", file=sys.stderr)
    how = dict(size=arguments.size, rank=arguments.rank, only=arguments.only)
    figures = process.fresh("memory:measure", **how)
    report.facts |= figures
    where = {"bytes": arguments.size}
    for kind in (MOVES, REDUCTIONS):
        some = [one["peak"] for one in figures["pairs"] if one["move"] == (kind == MOVES)]
        if some:
            means = (clock.geometric_mean(max(peak[side], 1) for peak in some) for side in SIDES)
            report.rows.append(Row(f"{kind}, mean of {len(some)}", "B", *means, where))
    more = [one for one in figures["pairs"] if one["peak"][OVERLAY] > one["peak"][STOCK]]
    shown = sorted(more, key=lambda one: one["peak"][OVERLAY] / one["peak"][STOCK], reverse=True)
    report.rows += [Row(one["pair"], "B", one["peak"][STOCK], one["peak"][OVERLAY], where) for one in shown]
    report.targets.append(Target("pairs that take more than stock", len(more), 0))
    report.notes.append("peak beyond the source, the result included; mean: geometric")


# --- in a process of its own


def measure(size: int, rank: int, only: str) -> dict[str, Any]:
    from . import pairs

    chosen = [pair for pair in all_pairs() if only in str(pair)]
    if not chosen:
        raise SystemExit(f"bench memory: no pair has {only!r} in it")
    peaks = {side: [one.peak for one in peaks_of(side, chosen, pairs.shape_of(size), rank)] for side in SIDES}
    return {
        "pairs": [
            {"pair": str(pair), "move": pair.is_move, "peak": {side: peaks[side][number] for side in SIDES}}
            for number, pair in enumerate(chosen)
        ]
    }


def all_pairs() -> list[Pair]:
    from .pairs import Pair

    sources = itertools.product(("R", "S0", "S1", "P"), repeat=len(SIZES))
    targets = list(itertools.product(("R", "S0", "S1"), repeat=len(SIZES)))
    return [Pair(SIZES, source, target) for source in sources for target in targets if source != target]


def peaks_of(side: str, chosen: list[Pair], shape: tuple[int, int], rank: int) -> list[Memory]:
    import torch

    from . import pairs
    from .allocations import allocated
    from .fake_world import fake_world

    logging.disable(logging.WARNING)  # what stock says where it gathers though it is asked to exchange
    with warnings.catch_warnings(), torch.no_grad(), fake_world(rank, 8), on(side):
        warnings.simplefilter("ignore")
        mesh = pairs.flattened_mesh(SIZES)
        memories = []
        for _, alike in itertools.groupby(chosen, key=lambda pair: pair.source):
            some = list(alike)
            move = pairs.source_tensor(some[0], mesh, shape).redistribute
            memories += allocated([functools.partial(move, mesh, pairs.placements(pair.target)) for pair in some])
        return memories
