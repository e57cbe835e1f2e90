"""Forms: what the plans for tensors of different sizes have in common, so that a change is planned once for many sizes.

Where all cuts are even, a plan takes a fixed time and a time for each byte. So it follows from the bytes of the tensor
alone which plan is the best, and one that is the best for two sizes is the best for all between. Standard library only.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from operator import mod
from typing import TYPE_CHECKING, Any, NamedTuple

from .plan import plan
from .steps import Divide, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cost import Cost
    from .regions import Regions

Steps = tuple[Step, ...]
_FAR = 1 << 40  # so many parts of a tensor: more than any has


class Form(NamedTuple):
    """A plan without the sizes of the tensor, and where it is known to be the best.

    Attributes:
        steps: on tensors of shape ().
        parts: for each dim, what its length must be a multiple of.
        least, most: the bytes of the whole tensor.
    """

    steps: Steps
    parts: tuple[int, ...]
    least: int
    most: int

    def serves(self, shape: Sequence[int], size: int) -> bool:
        """Whether it is the plan for a tensor of this shape and of so many bytes."""
        return self.least <= size <= self.most and is_multiple(shape, self.parts)


def plan_like_others(
    before: Regions, after: Regions, itemsize: int, groups: frozenset[tuple[int, ...]], cost: Cost
) -> Steps:
    """What `plan` says, without planning where it follows from the plans for other sizes."""
    shape = before.shape
    known = _known(on_shape(before, ()), on_shape(after, ()), groups, cost)
    size = math.prod(shape) * itemsize
    for form in tuple(known.values()):
        if form.serves(shape, size):
            return tuple([step_on_shape(step, shape) for step in form.steps])
    steps = plan(before, after, itemsize, groups, cost)
    parts = _parts(before, after, steps)
    if size and is_multiple(shape, parts):
        found = known.get(bare := without_sizes(steps), Form(bare, parts, size, size))
        if bare in known:
            found = _wider(found, before, after, itemsize, groups, cost)
        known[bare] = found._replace(least=min(found.least, size), most=max(found.most, size))
    return steps


@lru_cache(maxsize=1024)
def _known(before: Regions, after: Regions, groups: frozenset[tuple[int, ...]], cost: Cost) -> dict[Steps, Form]:
    """The forms found so far, by their steps."""
    return {}


def _wider(
    form: Form, before: Regions, after: Regions, itemsize: int, groups: frozenset[tuple[int, ...]], cost: Cost
) -> Form:
    """The form, asked once whether the smallest and the largest tensor have it, too."""
    if form.least < form.most or not form.parts:
        return form
    for shape in (form.parts, (form.parts[0] * _FAR, *form.parts[1:])):
        steps = plan(on_shape(before, shape), on_shape(after, shape), itemsize, groups, cost)
        if without_sizes(steps) == form.steps:
            size = math.prod(shape) * itemsize
            form = form._replace(least=min(form.least, size), most=max(form.most, size))
    return form


def _parts(before: Regions, after: Regions, steps: Steps) -> tuple[int, ...]:
    """What each length must be a multiple of, so that all plans that are compared cut evenly. Those that reduce may cut
    any dim on the way, also one that the chosen plan leaves alone."""
    parts = cut_into(before, after, steps)
    ended = before.pending - after.pending
    if not ended:
        return parts
    talking = ended.union(before.sharded, after.sharded)
    return (math.prod([before.sizes[axis] for axis in talking]),) * len(parts)


def cut_into(before: Regions, after: Regions, steps: Steps) -> tuple[int, ...]:
    """Into how many parts each dim is cut, by this plan or by others that it is chosen from; 1 if it isn't cut."""
    states = [
        before,
        after,
        *[end for step in steps if not isinstance(step, Divide) for end in (step.before, step.after)],
    ]
    cutting = [{axis for state in states for axis in state.orders[dim]} for dim in range(len(before.orders))]
    ended = before.pending - after.pending
    if ended:
        # What is reduced may be cut on the way, by all axes that take part.
        anywhere = set().union(*cutting, ended)
        cutting = [anywhere if axes else axes for axes in cutting]
    return tuple([math.prod([before.sizes[axis] for axis in axes]) for axes in cutting])


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
    return regions._replace(shape=shape)
