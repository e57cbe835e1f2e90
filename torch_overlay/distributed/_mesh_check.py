"""Compare meshes across ranks before groups are made, so that a mismatch is an error on every rank and not a hang.

Every rank puts a line about its mesh into the default group's store; rank 0 compares them and answers all. Costs each
rank two store operations, rank 0 one for each rank.
"""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import distributed_c10d

from ._group_table import group_table
from ._settings import get_settings


def check_same_mesh(mesh: str) -> None:
    """Raise on every rank unless all ranks of the world come here with the same line; off unless asked for.

    Args:
        mesh: what must agree, readable and complete.

    Raises:
        RuntimeError: ranks differ, or some didn't come within the default group's timeout; names the ranks.
    """
    world = distributed_c10d._get_default_group()
    if not get_settings().check_mesh or world.size() == 1 or distributed_c10d.get_backend(world) == "fake":
        return
    table = group_table()
    table.meshes += 1
    store = distributed_c10d._world.pg_map[world][1]
    prefix = f"mesh_check/{table.meshes}"
    seconds = _timeout_seconds(world)
    store.set(f"{prefix}/{world.rank()}", mesh)
    verdict: str | None
    if world.rank() == 0:
        verdict = _compare(store, prefix, world.size(), 0.8 * seconds)
        store.set(f"{prefix}/verdict", verdict)
    else:
        verdict = _read(store, f"{prefix}/verdict", seconds)
        if verdict is None:
            raise RuntimeError(
                f"Ranks compare their meshes before making groups, and rank 0 didn't answer within {seconds:g} s. "
                f"This rank builds {mesh}. See whether rank 0 died or skips this mesh."
            )
    if verdict != "same":
        raise RuntimeError(f"{verdict} This rank, {world.rank()}, builds {mesh}.")


def _timeout_seconds(world: distributed_c10d.ProcessGroup) -> float:
    timeout = distributed_c10d._world.pg_map[world][1].timeout
    for device in world._device_types:
        options = getattr(world._get_backend(device), "options", None)
        timeout = min(timeout, getattr(options, "_timeout", timeout))
    return max(1.0, timeout.total_seconds())


def _read(store: distributed_c10d.Store, key: str, seconds: float) -> str | None:
    """The value at ``key``, or None if nobody sets it in time."""
    try:
        store.wait([key], timedelta(seconds=max(0.1, seconds)))
    except RuntimeError:
        return None
    return store.get(key).decode()


def _compare(store: distributed_c10d.Store, prefix: str, size: int, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    said: dict[str, list[int]] = {}
    missing: list[int] = []
    for rank in range(size):
        line = _read(store, f"{prefix}/{rank}", deadline - time.monotonic())
        if line is None:
            missing.append(rank)
        else:
            said.setdefault(line, []).append(rank)
    if missing:
        return (
            f"All {size} ranks must build the same meshes in the same order, and ranks {missing} didn't come to this "
            f"one within {seconds:g} s. See whether they died or skip it."
        )
    if len(said) == 1:
        return "same"
    views = "; ".join(f"ranks {ranks} build {line}" for line, ranks in said.items())
    return f"All {size} ranks must build the same mesh, and they differ: {views}."
