"""Forms: what the plans for tensors of different sizes have in common, so that a change
is planned once for many sizes.

Where all cuts are even, the time of a plan is linear in the bytes of the tensor. So
tensors share a plan whose bytes, divided by the elements of the smallest tensor that
can be cut evenly, are nearest to the same power of two. It is the plan of that smallest
tensor, with elements of so many bytes. For example, from S0·S0 to S1·R on (2, 4) the
smallest has (8, 2) elements. With 4 bytes each, tensors of (1024, 64) and (1032, 64)
have 16,384 and 16,512 bytes for each of these, so both have the plan for (8, 2)
elements of 16,384 bytes.

Which plan a tensor has follows from its own sizes alone, never from those that were
asked for before: ranks with different histories would run different collectives.

Guards: which other sizes of a tensor have the same plan, for compilers that leave sizes
open.

Where a length is a multiple of all that may cut it, each step moves a share of the
tensor, so all that plans are chosen by grows with the number of elements: bytes in
proportion, seconds by a straight line. Each choice between two plans is then the same
for all numbers of elements up to where the two lines cross, or from there on. `Watched`
notes these points while one plan is made; no other size is planned.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import lru_cache
from operator import mod
from typing import TYPE_CHECKING, Any, NamedTuple

from .cost import Cost, bytes_of, in_rounds, staged_and_most_rounds, with_views
from .regions import Regions
from .search import plan, plan_at_once
from .steps import AllToAll, Collective, Divide, ReduceScatter, Step

if TYPE_CHECKING:
    from collections.abc import Sequence


Steps = tuple[Step, ...]


class Forms(NamedTuple):
    """The plans of one change for tensors that are cut evenly.

    Attributes:
        parts: for each dim, what its length must be a multiple of; None if tensors
            share nothing.
        steps: of a tensor as small as can be cut, by the power of two; None if plans
            were tried that cut other dims on the way.
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
    """`plan`; but all tensors that are cut evenly and have about as many bytes share
    one, apart from its rounds."""
    shape = before.shape
    parts, known = _forms(on_shape(before, ()), on_shape(after, ()), groups, cost)
    if parts and 0 not in shape and is_multiple(shape, parts):
        power = nearest_power(math.prod(shape) // math.prod(parts) * itemsize)
        if power not in known:
            known[power] = plan_form(before, after, parts, power, groups, cost)
        form = known[power]
        if form is not None:
            return in_rounds(
                tuple([step_on_shape(step, shape) for step in form]), itemsize, cost
            )
    return plan(before, after, itemsize, groups, cost)


def plan_form(
    before: Regions,
    after: Regions,
    parts: tuple[int, ...],
    power: int,
    groups: frozenset[tuple[int, ...]] | None,
    cost: Cost,
) -> Steps | None:
    """The plan of a tensor as small as can be cut, whose elements have so many bytes,
    as a power of two; None if plans were tried that cut other dims on the way."""
    tried: set[int] = set()
    steps = plan_at_once(
        on_shape(before, parts), on_shape(after, parts), 1 << power, groups, cost, tried
    )
    return (
        steps if all(before.orders[dim] or after.orders[dim] for dim in tried) else None
    )


@lru_cache(maxsize=1024)
def _forms(
    before: Regions,
    after: Regions,
    groups: frozenset[tuple[int, ...]] | None,
    cost: Cost,
) -> Forms:
    """Of a change without sizes."""
    return Forms(rounded_parts(before, after), {})


def rounded_parts(before: Regions, after: Regions) -> tuple[int, ...] | None:
    """For each dim, what its length must be a multiple of for a tensor to have the plan
    of its bytes rounded to a power of two: the number of ranks along all axes that may
    cut it on the way. These are the axes that cut it in source or target; where a
    reduction ends, all that take part, if any of them cuts it. None if no tensor has
    such a plan.
    """
    if after.pending - before.pending:
        return None  # how many collectives it may take isn't told by the time alone
    ended, ends = (
        before.pending - after.pending,
        [{*old, *new} for old, new in zip(before.orders, after.orders)],
    )
    talking = ended.union(before.sharded, after.sharded)
    return tuple(
        [
            math.prod([before.sizes[a] for a in (talking if ended and axes else axes)])
            for axes in ends
        ]
    )


def nearest_power(number: int) -> int:
    """Of two, by its factor: 11 is nearer to 8, and 12 to 16."""
    return (number * number).bit_length() // 2


def plan_and_parts(
    before: Regions,
    after: Regions,
    itemsize: int,
    groups: frozenset[tuple[int, ...]] | None,
    cost: Cost,
) -> tuple[Steps, tuple[int, ...]]:
    """The plan without rounds, and for each dim into how many parts it is cut, by this
    plan or by others that it was chosen from; 1 if none cuts it. Where all lengths are
    multiples of these, all those plans cut evenly."""
    tried: set[int] = set()
    steps = plan_at_once(before, after, itemsize, groups, cost, tried)
    changes = [step for step in steps if not isinstance(step, Divide)]
    states = [
        before,
        after,
        *[end for step in changes for end in (step.before, step.after)],
    ]
    dims = range(len(before.orders))
    cutting = [
        frozenset([axis for state in states for axis in state.orders[dim]])
        for dim in dims
    ]
    ended = before.pending - after.pending
    if ended:
        # What is reduced may be cut on the way, by all axes that take part. Which dims
        # were tried isn't known where new terms are made, so all may have been.
        talking = ended.union(before.sharded, after.sharded, *cutting)
        tried.update(dims if after.pending - before.pending else ())
        cutting = [
            talking if axes or dim in tried else axes
            for dim, axes in enumerate(cutting)
        ]
    return steps, tuple(
        [math.prod([before.sizes[axis] for axis in axes]) for axes in cutting]
    )


def is_multiple(shape: Sequence[int], parts: Sequence[int]) -> bool:
    """Whether each length can be cut into so many equal parts."""
    return not any(map(mod, shape, parts))


def step_on_shape(step: Step, shape: tuple[Any, ...]) -> Step:
    """The same step on a tensor of another shape."""
    if isinstance(step, Divide):
        return step
    return dataclasses.replace(
        step, before=on_shape(step.before, shape), after=on_shape(step.after, shape)
    )


def on_shape(regions: Regions, shape: tuple[Any, ...]) -> Regions:
    """The same cuts of a tensor of another shape."""
    return Regions(shape, *regions[1:])


# --- guards ---

# Seconds are compared to twelve digits, see `Cost.key`. What is nearer than this to a
# point is taken to be beyond it.
_NEAR = 1e-11
# Tensors of more elements are taken to have a plan that has no bound below: twelve
# digits of their seconds lose a latency, so that another plan may come first for
# nothing.
_FAR = 1 << 40


class Range(NamedTuple):
    """Factors of a number of elements, the ends included.

    >>> Range(0.25, 8.0).meet(Range(0.5, math.inf))
    Range(least=0.5, most=8.0)
    """

    least: float = 0.0
    most: float = math.inf

    def meet(self, other: Range) -> Range:
        """What is in both; 1, which always is, if they only touch."""
        return Range(
            min(max(self.least, other.least), 1.0), max(min(self.most, other.most), 1.0)
        )


class Guards(NamedTuple):
    """The sizes that have one plan, those of the tensor that was asked for among them.

    Attributes:
        parts: for each dim, what its length must be a multiple of; 1 where any will do.
            A dim whose length is known needn't be.
        least, most: of the elements of the whole tensor; no bound where most is None.
    """

    parts: tuple[int, ...]
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Watched(Cost):
    """A cost model that chooses as the other one does, and notes for how many times the
    elements it would."""

    ranges: list[Range] = field(default_factory=list, compare=False)

    @staticmethod
    def like(cost: Cost) -> Watched:
        """With the figures of this model."""
        return Watched(
            *[getattr(cost, figure.name) for figure in dataclasses.fields(Cost)]
        )

    def fastest(self, plans: Sequence[Steps], itemsize: int) -> Steps:
        """As `Cost.fastest`."""
        chosen = Cost.fastest(self, plans, itemsize)
        self.ranges.extend(
            self._faster(chosen, plan, itemsize) for plan in plans if plan is not chosen
        )
        return chosen

    def range(self) -> Range:
        """Where all choices would be the same."""
        found = Range()
        for each in self.ranges:
            found = found.meet(each)
        return found

    def _faster(self, one: Steps, other: Steps, itemsize: int) -> Range:
        """Where the one plan, which was chosen, is the faster by a margin; everywhere
        if both take as long by the same terms, and what comes after the seconds
        decides. As long by other terms is none: the last bit may decide."""
        terms, others = self._terms(one, itemsize), self._terms(other, itemsize)
        if terms == others:
            return Range()
        fixed, moving = (
            math.fsum(a) * (1 + _NEAR) - math.fsum(b)
            for a, b in zip(terms, others, strict=True)
        )
        if fixed + moving > 0:
            return Range(1.0, 1.0)  # faster by less than the margin
        if moving > 0:
            return Range(0.0, -fixed / moving * (1 - _NEAR))
        return Range(-fixed / moving * (1 + _NEAR), math.inf) if fixed > 0 else Range()

    def _terms(self, plan: Steps, itemsize: int) -> tuple[list[float], list[float]]:
        """The seconds of the collectives, without data and for their bytes, each in
        ascending order."""
        found = [
            self.fixed_and_moving(step, itemsize)
            for step in plan
            if isinstance(step, Collective)
        ]
        return sorted(fixed for fixed, _ in found), sorted(
            moving for _, moving in found
        )


def guards(
    before: Regions,
    after: Regions,
    itemsize: int,
    groups: frozenset[tuple[int, ...]] | None,
    cost: Cost,
) -> Guards:
    """Which sizes have the plan that `shared_plan` gives for these regions, with as
    many rounds. Open lengths that are no multiples of the parts have none that is
    known."""
    shape = before.shape
    elements = math.prod(shape)
    parts = rounded_parts(before, after)
    found = _rounds(shared_plan(before, after, itemsize, groups, cost), itemsize, cost)
    least, most = math.ceil(found.least * elements), found.most * elements
    if parts and 0 not in shape and is_multiple(shape, parts):
        smallest, watched = math.prod(parts), Watched.like(cost)
        power = nearest_power(elements // smallest * itemsize)
        form = plan_form(before, after, parts, power, groups, watched)
        first, last = _bytes_of_powers(watched.range(), power)
        least = max(least, -(-first // itemsize) * smallest)
        most = min(most, last // itemsize * smallest)
        if form is not None:
            return Guards(parts, least, _whole(most))
    watched = Watched.like(cost)
    _, parts = plan_and_parts(before, after, itemsize, groups, watched)
    found = watched.range()
    least, most = (
        max(least, math.ceil(found.least * elements)),
        min(most, found.most * elements),
    )
    return Guards(parts, least, _whole(most))


def _whole(bound: float) -> int | None:
    return None if bound > _FAR else math.floor(bound)


def _bytes_of_powers(factors: Range, power: int) -> tuple[int, int]:
    """The least and the greatest number whose nearest power of two is this one times a
    factor in the range.

    >>> [n for n in range(1, 100) if nearest_power(n) in (3, 4)] == [*range(6, 23)]
    True
    >>> _bytes_of_powers(Range(1.0, 2.0), 3)
    (6, 22)
    """
    first = power + math.ceil(math.log2(factors.least)) if factors.least else 0
    least = math.isqrt((1 << (2 * first - 1)) - 1) + 1 if first > 0 else 1
    last = power + math.floor(math.log2(min(factors.most, _FAR**2)))
    return least, math.isqrt((1 << (2 * last + 1)) - 1)


def _rounds(steps: Steps, itemsize: int, cost: Cost) -> Range:
    """For how many times the elements each step has as many rounds, see `in_rounds`."""
    found, whole = Range(), bytes_of(steps, itemsize)
    for step, is_view in with_views(steps):
        if not isinstance(step, (AllToAll, ReduceScatter)):
            continue
        staged, most = staged_and_most_rounds(step, is_view)
        sent, rounds = staged * itemsize, step.rounds
        if most < 2:
            continue  # always one
        if rounds == 1:
            found = found.meet(
                Range(0.0, 2 * cost.round_bytes / min(sent, whole) * (1 - _NEAR))
            )
            continue
        least = max((rounds // 2 + 1) / sent, 2 / whole)
        greatest = math.inf if most <= rounds else (rounds + 1) / sent
        found = found.meet(
            Range(
                least * cost.round_bytes * (1 + _NEAR),
                greatest * cost.round_bytes * (1 - _NEAR),
            )
        )
    return found
