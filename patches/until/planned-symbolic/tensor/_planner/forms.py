"""Before sizes may be symbolic, and plans are compared without sizes."""

from __future__ import annotations

import dataclasses

from .regions import Regions
from .steps import Divide, Step

without_sizes = ...


def step_on_shape(step: Step, shape: tuple[int, ...]) -> Step:
    """The same step on a tensor of another shape."""
    if isinstance(step, Divide):
        return step
    return dataclasses.replace(step, before=on_shape(step.before, shape), after=on_shape(step.after, shape))


def on_shape(regions: Regions, shape: tuple[int, ...]) -> Regions:
    """The same cuts of a tensor of another shape."""
    return Regions(shape, *regions[1:])
