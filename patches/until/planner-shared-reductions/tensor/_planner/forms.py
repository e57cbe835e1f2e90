"""Before reductions share plans."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from .plan import plan_at_once
from .steps import Divide

if TYPE_CHECKING:
    from .cost import Cost
    from .regions import Regions


@lru_cache(maxsize=1024)
def _forms(before: Regions, after: Regions, groups: frozenset[tuple[int, ...]] | None, cost: Cost) -> Forms:
    """Of a change without sizes. Each dim that source or target cuts must be a multiple of all axes that take part."""
    if before.pending != after.pending:
        return Forms(None, {})
    ranks = math.prod([before.sizes[axis] for axis in before.sharded.union(after.sharded)])
    return Forms(tuple([ranks if old or new else 1 for old, new in zip(before.orders, after.orders)]), {})


def plan_and_parts(
    before: Regions, after: Regions, itemsize: int, groups: frozenset[tuple[int, ...]] | None, cost: Cost
) -> tuple[Steps, tuple[int, ...]]:
    """The plan without rounds, and for each dim into how many parts this plan cuts it; 1 if it doesn't. Where all
    lengths are multiples of these, all its cuts are even."""
    steps = plan_at_once(before, after, itemsize, groups, cost)
    changes = [step for step in steps if not isinstance(step, Divide)]
    states = [before, after, *[end for step in changes for end in (step.before, step.after)]]
    dims = range(len(before.orders))
    cutting = [frozenset([axis for state in states for axis in state.orders[dim]]) for dim in dims]
    return steps, tuple([math.prod([before.sizes[axis] for axis in axes]) for axes in cutting])
