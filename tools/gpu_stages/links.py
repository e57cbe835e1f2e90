"""What several GPUs add: times by size, two collectives at once; both sides in turns."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import clock, pairs, redistribute
from benchmarks.sides import OVERLAY, SIDES, STOCK, in_turns, on

from . import RANKS, Check, Found, Run, asked


def links(run: Run) -> Iterator[Found]:
    """Where ranks share a GPU, or talk by gloo, this shows that the code runs, and nothing of links."""
    sizes = (1 << 22,) if run.dry else (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
    checks = [Check(moves, (sizes,)), Check(overlap, (sizes[-1], 1 if run.dry else 3))]
    for answer in asked(run._replace(seconds=90.0), checks, run.best, stock=True):
        # The world is stock's, and the overlay is on in every second turn: what fails is no fault of stock alone.
        yield answer | {"where": f"both sides on {run.best}", "outcome": answer["outcome"].removesuffix(" on stock")}


def now(device: str) -> float:
    """The time, when all ranks and their devices have come here."""
    import torch.distributed as dist

    redistribute.settle(device)
    dist.barrier()
    redistribute.settle(device)
    return time.perf_counter()


# --- on every rank


def moves(mesh: Any, rank: int, sizes: tuple[int, ...]) -> dict[str, Any] | str:
    """Microseconds of a call, by bytes of the whole tensor, pair and side. Every result is compared on every rank."""
    import torch

    meshes, figures = {}, {}
    for side in SIDES:
        with on(side):
            meshes[side] = {(2, 2): pairs.flattened_mesh((2, 2), mesh.device_type)}
    for size in sizes:
        with torch.no_grad():
            rows = redistribute.one_size(pairs.fewer(RANKS), meshes, size, rounds=1, batches=2)
        if any(row["wrong"][OVERLAY] for row in rows):
            return f"at {size} bytes: {[row['pair'] for row in rows if row['wrong'][OVERLAY]]}"
        figures[str(size)] = {
            row["pair"]: {side: round(row["seconds"][side] * 1e6, 1) for side in SIDES} for row in rows
        }
    return figures


def overlap(mesh: Any, rank: int, nbytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of a reduce-scatter over ``fsdp`` and an all-gather over ``ep``, two axes over the same ranks.

    On stock each axis has a group. Under the overlay they have two under ``share_groups="names"`` and one under
    ``"ranks"``, whose collectives then run one after the other, as if nothing had been asked for at once.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    device = mesh.device_type
    groups = {}
    for way in (STOCK, "names", "ranks"):
        with on(STOCK) if way == STOCK else on(OVERLAY, share_groups=way):
            root = init_device_mesh(device, (RANKS,), mesh_dim_names=("world",))
            views = root._unflatten(0, (2, 2), ("dp", "fsdp")), root._unflatten(0, (2, 2), ("pp", "ep"))
            groups[way] = views[0]["fsdp"].get_group(), views[1]["ep"].get_group()
    whole, part = (torch.ones(nbytes // 4 // many, device=device) for many in (1, 2))
    gathered = torch.empty_like(whole)

    def seconds(way: str, at_once: bool) -> float:
        fsdp, ep = groups[way]
        begun = now(device)
        for _ in range(5):
            works = [dist.reduce_scatter_tensor(part.clone(), whole, group=fsdp, async_op=True)]
            if not at_once:
                works.pop().wait()
                redistribute.settle(device)
            works.append(dist.all_gather_into_tensor(gathered, part, group=ep, async_op=True))
            for work in works:
                work.wait()
        return (now(device) - begun) / 5

    return {
        name: {way: clock.median(figures) for way, figures in in_turns(call, rounds, groups).items()}
        for name, call in (
            ("one after the other", functools.partial(seconds, at_once=False)),
            ("at once", functools.partial(seconds, at_once=True)),
        )
    }
