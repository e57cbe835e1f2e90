"""Before a move may take several collectives: all groups are at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cost import Cost
    from .groups import Groups
    from .regions import Regions


def move(before: Regions, after: Regions, groups: Groups, itemsize: int, cost: Cost) -> tuple[Step, ...]:
    """The best plan with one collective from `before` to `after`, whose pending reductions are the same. Its group is
    at hand."""
    axes = crossed(before, after)
    if not axes:
        return () if before == after else (Narrow(before, after),)
    return cost.fastest(list(_in_one(before, after, axes, groups)), itemsize)
