"""Before a move is a part of a reduction, which counts its collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cost import collectives

if TYPE_CHECKING:
    from .cost import Cost
    from .groups import Groups
    from .regions import Regions


def move(before: Regions, after: Regions, groups: Groups, itemsize: int, cost: Cost) -> tuple[Step, ...]:
    """The best plan from `before` to `after`, whose pending reductions are the same."""
    axes = crossed(before, after)
    if not axes:
        return () if before == after else (Narrow(before, after),)
    plans = list(_in_one(before, after, axes, groups))
    turns: list[Parts] = [] if plans and groups.has(axes) else [()]
    if cost.axes and len(axes) > 1:
        turns += cost.by_speed(axes)
    found = [_one_group_at_a_time(before, after, groups, itemsize, cost, parts) for parts in turns]
    if not plans:
        plans = [plan for plan in found if collectives(plan) <= collectives(found[0])]
    elif found:
        # More collectives that bring no more may be faster: a joint group is as slow as its slowest axis, and one over
        # more axes than need be has more latency.
        most = min(map(arriving_by, plans))
        plans += [plan for plan in found if arriving_by(plan) <= most]
    return cost.fastest(plans, itemsize)
