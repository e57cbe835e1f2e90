"""Before reductions share plans."""

from __future__ import annotations

import math
from typing import NamedTuple

from .cost import Cost
from .plan import plan, plan_at_once
from .regions import Regions
from .rounds import in_rounds
from .steps import Step

Steps = tuple[Step, ...]


class Forms(NamedTuple):
    """The plans of one change for tensors that are cut evenly.

    Attributes:
        parts: for each dim, what its length must be a multiple of; None if tensors share nothing.
        steps: of a tensor as small as can be cut, by the power of two.
    """

    parts: tuple[int, ...] | None
    steps: dict[int, Steps]


def shared_plan(
    before: Regions,
    after: Regions,
    itemsize: int,
    groups: frozenset[tuple[int, ...]] | None = None,
    cost: Cost = Cost(),
) -> Steps:
    """`plan`; but all tensors that are cut evenly and have about as many bytes share one, apart from its rounds."""
    shape = before.shape
    parts, known = _forms(on_shape(before, ()), on_shape(after, ()), groups, cost)
    if not parts or 0 in shape or not is_multiple(shape, parts):
        return plan(before, after, itemsize, groups, cost)
    power = _nearest_power(math.prod(shape) // math.prod(parts) * itemsize)
    if power not in known:
        known[power] = plan_at_once(on_shape(before, parts), on_shape(after, parts), 1 << power, groups, cost)
    return in_rounds(tuple([step_on_shape(step, shape) for step in known[power]]), itemsize, cost)


def rounded_parts(before: Regions, after: Regions) -> tuple[int, ...] | None:
    """For each dim, what its length must be a multiple of for a tensor to have the plan of its bytes rounded to a power
    of two: where source or target cuts it, the number of all ranks that take part. None if no tensor has such a plan.
    """
    if before.pending != after.pending:
        return None
    ranks = math.prod([before.sizes[axis] for axis in before.sharded.union(after.sharded)])
    return tuple([ranks if old or new else 1 for old, new in zip(before.orders, after.orders)])
