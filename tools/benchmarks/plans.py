"""What a redistribution takes: collectives and bytes of every pair of placements on a (2, 2, 2) mesh; no times.

Targets are replicas and shards of dims 0 and 1, sources these and pending sums; every set of axes is flattened on both
sides. Both planners are asked, nothing is sent. Bytes are those that the busiest rank of each collective gets.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import types
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
    counted = [(source, target, counts(source, target, shape, arguments.device)) for source, target in chosen]
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
    from torch_overlay.show import asked, plans, typed

    mesh = typed.parse_mesh("2,2,2", None, None)
    ends = [typed.parse_placements(text, len(SIZES)) for text in (source, target)]
    plan = asked.of_words(ends, shape, torch.float32, mesh, None, Cost.of(device)).plan
    torchs = [tuple(map(plans.to_torch_placement, end)) for end in ends]
    return {STOCK: _of_stock(*torchs, shape, device), OVERLAY: (plan.collectives, plan.incoming)}


def _of_stock(source: tuple, target: tuple, shape: tuple[int, int], device: str) -> tuple[int, int]:
    """The same of torch's own plan: its planner is asked, and its merging of steps over flattened meshes."""
    from torch.distributed.tensor import _redistribute as planner

    mesh = _stand_in(device)
    before, after = (_spec(mesh, end, shape) for end in (source, target))
    infos = planner._gen_transform_infos_non_cached(before, after)
    infos = planner._optimize_transform_infos(infos, mesh, source, target)
    held = math.prod(shape) // math.prod([n for n, placed in zip(SIZES, source) if placed.is_shard()])
    collectives, elements = 0, 0
    for info in infos:
        old, new = info.src_dst_placements
        ranks = math.prod([SIZES[axis] for axis in getattr(info, "original_mesh_dims", (info.mesh_dim,))])
        if old.is_partial() and new.is_replicate():
            gets, after_it = -(-2 * (ranks - 1) * held // ranks), held
        elif old.is_partial() and new.is_shard():
            gets, after_it = (ranks - 1) * held // ranks, held // ranks
        elif old.is_shard() and new.is_replicate():
            gets, after_it = (ranks - 1) * held, held * ranks
        elif old.is_shard() and new.is_shard() and device != "cpu":
            gets, after_it = (ranks - 1) * held // ranks, held
        elif old.is_shard() and new.is_shard():  # gloo gathers, then each rank keeps its part
            gets, after_it = (ranks - 1) * held, held
        else:
            held //= ranks
            continue
        collectives, elements, held = collectives + 1, elements + gets, after_it
    return collectives, elements * 4


@functools.cache
def _stand_in(device: str) -> Any:
    """A mesh without process groups, on which every set of axes is flattened: of that, torch asks the layout alone."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from torch_overlay.distributed._torch import flattened_to_torch, from_torch

    ranks = torch.arange(math.prod(SIZES), dtype=torch.int).view(SIZES)
    mesh = DeviceMesh(device, ranks, mesh_dim_names=("a", "b", "c"), _init_backend=False, _rank=0)
    for axes in [axes for count in (2, 3) for axes in itertools.combinations(range(3), count)]:
        layout = flattened_to_torch(from_torch(mesh._layout).select(axes).collapse())
        mesh._flatten_mapping["".join("abc"[axis] for axis in axes)] = types.SimpleNamespace(_layout=layout)
    return mesh


def _spec(mesh: Any, placements: tuple, shape: tuple[int, int]) -> Any:
    import torch
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), (shape[1], 1), torch.float32))
