"""What several GPUs add: times by size, both sides in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks import pairs, redistribute
from benchmarks.sides import OVERLAY, SIDES, on

from . import RANKS, Check, Found, Run, asked


def links(run: Run) -> Iterator[Found]:
    """Where ranks share a GPU, or talk by gloo, this shows that the code runs, and nothing of links."""
    sizes = (1 << 22,) if run.dry else (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
    for answer in asked(run._replace(seconds=90.0), [Check(moves, (sizes,))], run.best, stock=True):
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
