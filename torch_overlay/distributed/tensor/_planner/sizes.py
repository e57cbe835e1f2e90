"""Plans for many sizes. Start reading at `shared_plan` and at `guards`.

Forms: one plan for all tensors of about the same number of bytes. If all cuts are even,
the time of a plan is linear in the bytes of the tensor. Call the smallest tensor that
can be cut evenly the form, and divide the bytes of a tensor by the elements of the
form. Tensors for which this is nearest to the same power of two share a plan: that of
the form, with elements of so many bytes. For example, from S0·S0 to S1·R on (2, 4) the
form has (8, 2) elements. With 4 bytes per element, tensors of (1024, 64) and (1032, 64)
have 16,384 and 16,512 bytes for each element of the form, so both have the plan for (8,
2) elements of 16,384 bytes.

The plan of a tensor follows from its own sizes, never from sizes that were seen before:
ranks with different histories would run different collectives.

Guards: which other sizes of a tensor have the same plan, for compilers with symbolic
sizes. If a length is a multiple of all that may cut it, each step moves a fixed share
of the tensor. Bytes are then proportional to the number of elements, and seconds are
linear in it. So the choice between two plans changes only where their lines cross.
`Watched` records these points while one plan is made; no other size is planned.
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
    """The plans that evenly cut tensors share, for one change of placements.

    Attributes:
        parts: for each dim, what its length must be a multiple of; None if tensors
            share nothing.
        steps: the plan of the form, by the power of two of its element size; None if
            the search tried other dims to cut on the way, whose lengths are too short
            in the form.
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
    """Like `plan`, but tensors that are cut evenly and have about as many bytes share
    one remembered plan, except for its rounds."""
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
    """Return the plan of the form, with elements of `1 << power` bytes. None if the
    search tried other dims to cut on the way."""
    steps, tried = plan_at_once(
        on_shape(before, parts), on_shape(after, parts), 1 << power, groups, cost
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
    """Return the shared plans of a change. Cached: what is entered is there at next
    call."""
    return Forms(rounded_parts(before, after), {})


def rounded_parts(before: Regions, after: Regions) -> tuple[int, ...] | None:
    """Return for each dim the number that its length must be a multiple of, so that the
    tensor shares its plan with others of about as many bytes (see `Forms`): the ranks
    along all axes that cut the dim in `before` or `after`. If a reduction ends and some
    axis cuts the dim, also all axes of the reduction and all that cut another dim.

    None if `after` has a pending reduction that `before` doesn't have.
    """
    if after.pending - before.pending:
        # New terms limit the number of collectives, too, which isn't linear in bytes.
        return None
    ended, cutting = (
        before.pending - after.pending,
        [{*old, *new} for old, new in zip(before.orders, after.orders)],
    )
    talking = ended.union(before.sharded, after.sharded)
    return tuple(
        [
            math.prod([before.sizes[a] for a in (talking if ended and axes else axes)])
            for axes in cutting
        ]
    )


def nearest_power(number: int) -> int:
    """The exponent of the power of two nearest by ratio: 11 is nearer to 8, 12 to
    16."""
    return (number * number).bit_length() // 2


def plan_and_parts(
    before: Regions,
    after: Regions,
    itemsize: int,
    groups: frozenset[tuple[int, ...]] | None,
    cost: Cost,
) -> tuple[Steps, tuple[int, ...]]:
    """Return the plan without rounds, and for each dim the parts into which this plan
    or one that it was chosen from cuts it. Multiples of these are all cut evenly."""
    steps, tried = plan_at_once(before, after, itemsize, groups, cost)
    moving = [step for step in steps if not isinstance(step, Divide)]
    states = [
        before,
        after,
        *[end for step in moving for end in (step.before, step.after)],
    ]
    dims = range(len(before.orders))
    cutting = [
        frozenset([axis for state in states for axis in state.orders[dim]])
        for dim in dims
    ]
    ended = before.pending - after.pending
    if ended:
        # All axes that take part may cut the result of a reduction on the way.
        talking = ended.union(before.sharded, after.sharded, *cutting)
        cutting = [
            talking if axes or dim in tried else axes
            for dim, axes in enumerate(cutting)
        ]
    return steps, tuple(
        [math.prod([before.sizes[axis] for axis in axes]) for axes in cutting]
    )


def is_multiple(shape: Sequence[int], parts: Sequence[int]) -> bool:
    """True if each length is a multiple of its parts."""
    return not any(map(mod, shape, parts))


def step_on_shape(step: Step, shape: tuple[Any, ...]) -> Step:
    """Return the same step, with its rounds, on another shape, which may have
    symbols."""
    if isinstance(step, Divide):
        return step
    return dataclasses.replace(
        step, before=on_shape(step.before, shape), after=on_shape(step.after, shape)
    )


def on_shape(regions: Regions, shape: tuple[Any, ...]) -> Regions:
    """Return the same cuts of another shape, which may have symbols; () gives a key."""
    return Regions(shape, *regions[1:])


# --- guards ---

# `Cost.key` compares seconds to twelve digits. Sizes that are nearer than this to a
# point where the choice changes are excluded.
_NEAR = 1e-11
# A bound above this many elements counts as no bound. Seconds of so large a tensor
# don't show a latency in twelve digits, so that plans which differ in it compare equal.
_FAR = 1 << 40


class Range(NamedTuple):
    """A range of factors by which the number of elements may change, ends included.

    >>> Range(0.25, 8.0).meet(Range(0.5, math.inf))
    Range(least=0.5, most=8.0)
    """

    least: float = 0.0
    most: float = math.inf

    def meet(self, other: Range) -> Range:
        """Return the factors that both ranges have, 1 among them up to rounding."""
        return Range(
            min(max(self.least, other.least), 1.0), max(min(self.most, other.most), 1.0)
        )


class Guards(NamedTuple):
    """The sizes that share one plan, among them those of the tensor that was planned.

    Attributes:
        parts: for each dim, what its length must be a multiple of; 1 if any length will
            do. A dim with a known length needn't be a multiple.
        least, most: bounds on the elements of the global tensor; None is no bound.
    """

    parts: tuple[int, ...]
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Watched(Cost):
    """A cost model that chooses like another one, and records for which numbers of
    elements it would choose the same.

    Attributes:
        ranges: one for each plan that was not chosen.
    """

    ranges: list[Range] = field(default_factory=list, compare=False)

    @staticmethod
    def like(cost: Cost) -> Watched:
        return Watched(
            *[getattr(cost, figure.name) for figure in dataclasses.fields(Cost)]
        )

    def fastest(self, plans: Sequence[Steps], itemsize: int) -> Steps:
        """Choose as `Cost.fastest` does, and record a range for each other plan."""
        chosen = Cost.fastest(self, plans, itemsize)
        self.ranges.extend(
            self._faster(chosen, plan, itemsize) for plan in plans if plan is not chosen
        )
        return chosen

    def range(self) -> Range:
        """Return the factors of the number of elements that keep all choices."""
        common = Range()
        for factors in self.ranges:
            common = common.meet(factors)
        return common

    def _faster(self, one: Steps, other: Steps, itemsize: int) -> Range:
        """Return the factors of the number of elements for which `one` stays faster:
        any if both plans take as long by the same terms. A tie of different terms gives
        only the factor 1: rounding could decide it otherwise for another size."""
        terms, other_terms = self._terms(one, itemsize), self._terms(other, itemsize)
        if terms == other_terms:
            return Range()
        fixed, moving = (
            math.fsum(a) * (1 + _NEAR) - math.fsum(b)
            for a, b in zip(terms, other_terms, strict=True)
        )
        if fixed + moving > 0:
            # Faster, but by less than the margin.
            return Range(1.0, 1.0)
        if moving > 0:
            return Range(0.0, -fixed / moving * (1 - _NEAR))
        return Range(-fixed / moving * (1 + _NEAR), math.inf) if fixed > 0 else Range()

    def _terms(self, plan: Steps, itemsize: int) -> tuple[list[float], list[float]]:
        """Return the collectives' seconds without data, and for bytes, ascending."""
        seconds = [
            self.fixed_and_moving(step, itemsize)
            for step in plan
            if isinstance(step, Collective)
        ]
        return sorted(fixed for fixed, _ in seconds), sorted(
            moving for _, moving in seconds
        )


def guards(
    before: Regions,
    after: Regions,
    itemsize: int,
    groups: frozenset[tuple[int, ...]] | None,
    cost: Cost,
) -> Guards:
    """Return which sizes have the plan of `shared_plan` with as many rounds. No plan is
    known for symbolic lengths that aren't multiples of the parts."""
    shape = before.shape
    elements = math.prod(shape)
    parts = rounded_parts(before, after)
    same = _same_rounds(
        shared_plan(before, after, itemsize, groups, cost), itemsize, cost
    )
    least, most = math.ceil(same.least * elements), same.most * elements
    if parts and 0 not in shape and is_multiple(shape, parts):
        smallest, watched = math.prod(parts), Watched.like(cost)
        power = nearest_power(elements // smallest * itemsize)
        form = plan_form(before, after, parts, power, groups, watched)
        first, last = _bytes_of_powers(watched.range(), power)
        least = max(least, -(-first // itemsize) * smallest)
        most = min(most, last // itemsize * smallest)
        if form is not None:
            return Guards(parts, least, _whole(most))
    # The tensor has a plan of its own, which other sizes share only exactly.
    watched = Watched.like(cost)
    _, parts = plan_and_parts(before, after, itemsize, groups, watched)
    same = watched.range()
    least = max(least, math.ceil(same.least * elements))
    most = min(most, same.most * elements)
    return Guards(parts, least, _whole(most))


def _whole(bound: float) -> int | None:
    """Round an upper bound of elements down; None above `_FAR`, more than tensors
    have."""
    return None if bound > _FAR else math.floor(bound)


def _bytes_of_powers(factors: Range, power: int) -> tuple[int, int]:
    """Return the least and the most bytes nearest to `1 << power` times such a factor.

    >>> [n for n in range(1, 100) if nearest_power(n) in (3, 4)] == [*range(6, 23)]
    True
    >>> _bytes_of_powers(Range(1.0, 2.0), 3)
    (6, 22)
    """
    first = power + math.ceil(math.log2(factors.least)) if factors.least else 0
    least = math.isqrt((1 << (2 * first - 1)) - 1) + 1 if first > 0 else 1
    last = power + math.floor(math.log2(min(factors.most, _FAR**2)))
    return least, math.isqrt((1 << (2 * last + 1)) - 1)


def _same_rounds(steps: Steps, itemsize: int, cost: Cost) -> Range:
    """Return the factors of the number of elements that keep each step's rounds."""
    factors, tensor_bytes = Range(), bytes_of(steps, itemsize)
    for step, is_view in with_views(steps):
        if not isinstance(step, (AllToAll, ReduceScatter)):
            continue
        staged, most = staged_and_most_rounds(step, is_view)
        staged_bytes, rounds = staged * itemsize, step.rounds
        if most < 2:
            continue  # one round for every size
        if rounds == 1:
            factors = factors.meet(
                Range(
                    0.0,
                    2
                    * cost.round_bytes
                    / min(staged_bytes, tensor_bytes)
                    * (1 - _NEAR),
                )
            )
            continue
        least = max((rounds // 2 + 1) / staged_bytes, 2 / tensor_bytes)
        greatest = math.inf if most <= rounds else (rounds + 1) / staged_bytes
        factors = factors.meet(
            Range(
                least * cost.round_bytes * (1 + _NEAR),
                greatest * cost.round_bytes * (1 - _NEAR),
            )
        )
    return factors
