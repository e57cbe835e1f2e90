"""Before gathers run, and anything goes on while a collective runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._pack import Coordinate, Local, Place, Stages
from ._planner.steps import AllToAll, Collective, Narrow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._joint_groups import Group
    from ._planner.boxes import Box


def runners(
    steps: Sequence[Narrow | Collective],
    coordinate: Coordinate,
    held: Box,
    group_of: Callable[[tuple[int, ...]], Group],
) -> Stages:
    """What takes the local tensor of the source, the box `held`, to that of the target, function after function."""
    made: list[Local] = []
    for step in steps:
        place = Place(coordinate, held, step.after.box(coordinate))
        if isinstance(step, Collective):
            made += _COLLECTIVES[type(step)](step, place, group_of(step.axes), _wait)
        else:
            made.append(_LOCAL[type(step)](step, place))
        held = place.wanted
    return tuple(made)


_LOCAL: dict[type, Callable[..., Local]] = {Narrow: _narrow}
_COLLECTIVES: dict[type, Callable[..., Stages]] = {AllToAll: _all_to_all}
_later = ...
_moved = ...
_all_gather = ...
_all_gather_spelled = ...
_padded = ...
