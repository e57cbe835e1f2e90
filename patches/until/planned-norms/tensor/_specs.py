"""Before norms are read."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from ._planner.regions import NotPlanned


def _read_placement(placement: Any) -> tuple[int | None, str | None, int]:
    """The dim that it shards, the pending reduction, the split factor. Exactly these classes: a subclass may mean
    anything."""
    kind = type(placement)
    if kind is Shard:
        return placement.dim, None, 1
    if kind is Replicate:
        return None, None, 1
    if kind is Partial:
        return None, placement.reduce_op, 1
    if kind is _StridedShard:
        return placement.dim, None, placement.split_factor
    raise NotPlanned(f"a placement of the class {kind.__name__}")


_norm_class = ...
norm_ended = ...
Ends = ...
read_ends = ...
_read_ends = ...
