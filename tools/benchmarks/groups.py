"""Process groups: how many real trainers get, and how many calls make them.

Counted on one rank of the fake backend, each side in a process of its own.
"""

from __future__ import annotations

import argparse
import sys

from . import process
from .report import Report, Row, Target
from .sides import OVERLAY, STOCK, on

TITAN = dict(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2, ep=8)  # torchtitan's recipe, on 64 ranks
CALLS, GROUPS = "new_group calls", "groups"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ones", type=int, default=8192, metavar="W", help="ranks of the mesh (1, W, 1, 1)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    counts = {}
    for side, share in ((STOCK, None), (OVERLAY, "names"), (OVERLAY, "ranks")):
        print(f"groups: counting on {side}{f', {share} shared' if share else ''}", file=sys.stderr)
        counts[share] = process.fresh("groups:count", side=side, share=share, ones=arguments.ones)
    for share in ("names", "ranks"):
        for recipe, stock in counts[None].items():
            where = {"recipe": recipe if share == "names" else f"{recipe}, ranks"}
            report.rows += [Row(name, "", stock[name], counts[share][recipe][name], where) for name in (GROUPS, CALLS)]
    bounds = {"torchtitan": 10 + 1, "torchtitan, ranks": 9 + 1, "accelerate": 5 + 1, "accelerate, ranks": 2 + 1}
    for recipe, bound in bounds.items():
        row = report.row(GROUPS, recipe=recipe)
        report.targets.append(Target(f"groups of a rank, {recipe}", row.overlay, bound))
    report.targets.append(Target("new_group calls of (1, W, 1, 1)", report.row(CALLS, recipe="ones").overlay, 6))
    report.notes += [
        f"torchtitan: 64 ranks, {', '.join(f'{k} {v}' for k, v in TITAN.items())}, five views and a flattened one",
        f"accelerate: (8, 8), one axis flattened three times; ones: (1, {arguments.ones}, 1, 1)",
        "groups of one rank, the world's own not counted, one for the whole mesh among the overlay's; recipes with "
        '"ranks" run under share_groups="ranks"',
    ]


# --- counts, in a process of one side


def count(side: str, share: str | None, ones: int) -> dict[str, dict[str, int]]:
    recipes = {
        "torchtitan": (64, torchtitan),
        "accelerate": (64, accelerate),
        "ones": (ones, lambda world: _mesh((1, world, 1, 1), ("pp", "dp", "cp", "tp"))),  # all parallelism off but one
    }
    from .fake_world import GroupCounter, fake_world

    counts = {}
    with on(side, **({"share_groups": share} if share else {})):
        for name, (world, recipe) in recipes.items():
            with fake_world(world // 2 + 1, world), GroupCounter() as counter:
                recipe(world)
                groups = counter.open()
                counts[name] = {GROUPS: len(groups), CALLS: counter.calls}
    return counts


def _mesh(sizes: tuple[int, ...], names: tuple[str, ...]):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def torchtitan(world: int) -> None:
    """The five views of one world that torchtitan trains a mixture of experts on, and the loss flattened from one."""
    d = TITAN
    root = _mesh((world,), ("world",))
    dp, efsdp = d["dp_replicate"] * d["dp_shard"], d["dp_shard"] * d["cp"] * d["tp"] // d["ep"]

    def view(**axes: int):
        return root._unflatten(0, tuple(axes.values()), tuple(axes))

    loading = view(pp=d["pp"], batch=dp, cp=d["cp"], tp=d["tp"])
    loading["batch", "cp"]._flatten("loss")
    view(pp=d["pp"], dp_replicate=d["dp_replicate"], dp_shard=d["dp_shard"], cp=d["cp"], tp=d["tp"])
    view(pp=d["pp"], dp=dp, cp=d["cp"], tp=d["tp"])
    view(pp=d["pp"], dp_replicate=d["dp_replicate"], efsdp=efsdp, ep=d["ep"])


def accelerate(world: int) -> None:
    mesh = _mesh((world // 8, 8), ("dp_shard", "tp"))
    for name in ("dp", "dp_shard_cp", "dp_cp"):
        mesh["dp_shard",]._flatten(name)
