"""Before reductions run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._pack import Coordinate, Local, Place, Stages
from ._planner.steps import AllGather, AllToAll, Collective, Narrow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._joint_groups import Group
    from ._planner.boxes import Box


def runners(
    steps: Sequence[Narrow | Collective],
    coordinate: Coordinate,
    held: Box,
    group_of: Callable[[tuple[int, ...]], Group],
    async_op: bool = False,
) -> Stages:
    """What takes the local tensor of the source, the box `held`, to that of the target, one function after the other.

    With `async_op` the last collective isn't waited for here: its result is an `AsyncCollectiveTensor`, for which
    whatever reads it waits. Where something reads it here, an unpack that copies or a step after it, it is waited for
    at once, and so is what runs in rounds.
    """
    last = max([number for number, step in enumerate(steps) if isinstance(step, Collective)], default=-1)
    made: list[Local] = []
    for number, step in enumerate(steps):
        place = Place(coordinate, held, step.after.box(coordinate))
        if isinstance(step, Collective):
            finish = _later if async_op and number == last else _wait
            made += _COLLECTIVES[type(step)](step, place, group_of(step.axes), finish)
        else:
            made.append(_LOCAL[type(step)](step, place))
        held = place.wanted
    return tuple(made)


_LOCAL: dict[type, Callable[..., Local]] = {Narrow: _narrow}
_COLLECTIVES: dict[type, Callable[..., Stages]] = {AllGather: _all_gather, AllToAll: _all_to_all}
_divide = ...
_embed = ...
_all_reduce = ...
