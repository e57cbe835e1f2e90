"""Forms: what the plans for tensors of different sizes have in common, so that a change is planned once for many sizes.

Where all cuts are even, the time of a plan is linear in the bytes of the tensor. So tensors share a plan whose bytes,
divided by the elements of the smallest tensor that can be cut evenly, are nearest to the same power of two. It is the
plan of that smallest tensor, with elements of so many bytes. For example, from S0·S0 to S1·R on (2, 4) the smallest has
(8, 8) elements. With 4 bytes each, tensors of (1024, 64) and (1032, 64) have 4096 and 4128 bytes for each of these, so
both have the plan for (8, 8) elements of 4096 bytes.

Which plan a tensor has follows from its own sizes alone, never from those that were asked for before: ranks with
different histories would run different collectives.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from operator import mod
from typing import TYPE_CHECKING, Any, NamedTuple

from .cost import Cost
from .plan import plan, plan_at_once
from .regions import Regions
from .rounds import in_rounds
from .steps import Divide, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

Steps = tuple[Step, ...]


class Forms(NamedTuple):
    """The plans of one change for tensors that are cut evenly.

    Attributes:
        parts: for each dim, what its length must be a multiple of; None if tensors share nothing.
        steps: of a tensor as small as can be cut, by the power of two; None if plans were tried that
            cut other dims on the way.
    """

    parts: tuple[int, ...] | None
    steps: dict[int, Steps | None]


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
    if parts and 0 not in shape and is_multiple(shape, parts):
        power = _nearest_power(math.prod(shape) // math.prod(parts) * itemsize)
        if power not in known:
            tried: set[int] = set()
            steps = plan_at_once(on_shape(before, parts), on_shape(after, parts), 1 << power, groups, cost, tried)
            known[power] = steps if all(before.orders[dim] or after.orders[dim] for dim in tried) else None
        form = known[power]
        if form is not None:
            return in_rounds(tuple([step_on_shape(step, shape) for step in form]), itemsize, cost)
    return plan(before, after, itemsize, groups, cost)


@lru_cache(maxsize=1024)
def _forms(before: Regions, after: Regions, groups: frozenset[tuple[int, ...]] | None, cost: Cost) -> Forms:
    """Of a change without sizes."""
    return Forms(rounded_parts(before, after), {})


def rounded_parts(before: Regions, after: Regions) -> tuple[int, ...] | None:
    """For each dim, what its length must be a multiple of for a tensor to have the plan of its bytes rounded to a power
    of two: where source or target cuts it, the number of all ranks that take part. None if no tensor has such a plan.
    """
    if after.pending - before.pending:
        return None  # how many collectives it may take isn't told by the time alone
    talking = before.sharded.union(after.sharded, before.pending - after.pending)
    ranks = math.prod([before.sizes[axis] for axis in talking])
    return tuple([ranks if old or new else 1 for old, new in zip(before.orders, after.orders)])


def _nearest_power(number: int) -> int:
    """Of two, by its factor: 11 is nearer to 8, and 12 to 16."""
    return (number * number).bit_length() // 2


def plan_and_parts(
    before: Regions, after: Regions, itemsize: int, groups: frozenset[tuple[int, ...]] | None, cost: Cost
) -> tuple[Steps, tuple[int, ...]]:
    """The plan without rounds, and for each dim into how many parts it is cut, by this plan or by others that it was
    chosen from; 1 if none cuts it. Where all lengths are multiples of these, all those plans cut evenly."""
    tried: set[int] = set()
    steps = plan_at_once(before, after, itemsize, groups, cost, tried)
    changes = [step for step in steps if not isinstance(step, Divide)]
    states = [before, after, *[end for step in changes for end in (step.before, step.after)]]
    dims = range(len(before.orders))
    cutting = [frozenset([axis for state in states for axis in state.orders[dim]]) for dim in dims]
    ended = before.pending - after.pending
    if ended:
        # What is reduced may be cut on the way, by all axes that take part. Which dims were tried isn't known where new
        # terms are made, so all may have been.
        talking = ended.union(before.sharded, after.sharded, *cutting)
        tried.update(dims if after.pending - before.pending else ())
        cutting = [talking if axes or dim in tried else axes for dim, axes in enumerate(cutting)]
    return steps, tuple([math.prod([before.sizes[axis] for axis in axes]) for axes in cutting])


def is_multiple(shape: Sequence[int], parts: Sequence[int]) -> bool:
    """Whether each length can be cut into so many equal parts."""
    return not any(map(mod, shape, parts))


def without_sizes(steps: Steps) -> Steps:
    """The steps without the sizes of the tensor."""
    return tuple([step_on_shape(step, ()) for step in steps])


def step_on_shape(step: Step, shape: tuple[Any, ...]) -> Step:
    """The same step on a tensor of another shape."""
    if isinstance(step, Divide):
        return step
    return dataclasses.replace(step, before=on_shape(step.before, shape), after=on_shape(step.after, shape))


def on_shape(regions: Regions, shape: tuple[Any, ...]) -> Regions:
    """The same cuts of a tensor of another shape."""
    return Regions(shape, *regions[1:])
