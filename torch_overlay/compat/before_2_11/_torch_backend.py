"""The door to the backend that torch chooses for a group of a mesh: up to 2.10 it isn't always the default group's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed import distributed_c10d


def chosen_backend(backend: str | None, options: Any, device_type: str, ranks: Sequence[int]) -> str | None:
    """Beside a gloo world, an axis that is the world has NCCL for its GPUs. Torch asks whether this host has one; here
    the mesh decides, and the build of torch, which ranks have in common."""
    world = distributed_c10d._get_default_group()
    is_world = backend is None and options is None and [*ranks] == [*range(world.size())]
    if is_world and device_type == "cuda" and distributed_c10d.get_backend(world) == "gloo":
        return "cpu:gloo,cuda:nccl" if distributed_c10d.is_nccl_available() else None
    return backend
