"""The door to what torch's specs say where strided shards come with a shard order."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor.placement_types import Placement, _StridedShard


def order_beside(shard_order: Any, placements: tuple[Placement, ...]) -> Any:
    """What a spec's shard order says beside these placements: nothing beside strided shards. Torch 2.10 writes the
    order that their split factors say, and its steps ask the factors, whatever the order is."""
    return () if _StridedShard in map(type, placements) else shard_order
