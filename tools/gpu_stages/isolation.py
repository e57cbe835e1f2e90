"""What stock keeps apart stays apart: the programs of test/isolation, with tensors on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import RANKS, Check, Found, Run, asked

ALONE = (  # one thread on each rank, of which others know nothing
    "one_replica_gathers",
    "an_empty_last_batch",
    "one_owner_destroys_its_groups",
    "one_pair_destroys_its_group",
    "groups_of_size_1_are_destroyed",
)
BESIDE = (  # two threads, each with a mesh or a group of its own
    "metric_beside_redistribution",
    "two_private_meshes",
    "equal_meshes_in_two_threads",
    "two_meshes_two_axes",
    "a_view_made_in_a_private_block",
)


def isolation(run: Run) -> Iterator[Found]:
    """Threads by gloo only: NCCL wants the communicators of a process used in one order on all ranks."""
    few = 2 if run.dry else len(BESIDE)
    yield from asked(run, [Check(kept_apart, (name,)) for name in BESIDE[:few]])
    yield from asked(run, [Check(kept_apart, (name,)) for name in ALONE], run.best)


# --- on every rank


def kept_apart(mesh: Any, rank: int, name: str) -> None:
    """Raises where a number is wrong."""
    import torch

    import isolation_cases
    import isolation_tools

    isolation_tools.DEVICE = "cpu" if mesh.device_type == "cpu" else f"cuda:{torch.cuda.current_device()}"
    getattr(isolation_cases, name)(rank, RANKS)
