"""Before zeros may be put around a shard as the first step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cost import Cost
    from .groups import Groups
    from .regions import Regions
    from .steps import Step


def _with_reductions(source: Regions, target: Regions, have: Groups, itemsize: int, cost: Cost) -> tuple[Step, ...]:
    made = _made_pending(source, target)
    if not made:
        return _reduce_and_move(source, target, have, itemsize, cost)
    steps = _embed_last(source, target, made, have, itemsize, cost)
    parts = math.prod(source.sizes[a] for a in made - source.sharded if target.partial[a] == "sum")
    return steps if parts == 1 else (*steps, Divide(parts))
