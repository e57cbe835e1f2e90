"""Before a move is a part of a reduction, which counts its collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    if not plans:
        return _one_group_at_a_time(before, after, groups, itemsize, cost)
    # More collectives that bring no more may be faster: a joint group is as slow as its slowest axis, and one over more
    # axes than need be has more latency.
    turns: list[Parts] = [] if groups.has(axes) else [()]
    if cost.axes and len(axes) > 1:
        turns += cost.by_speed(axes)
    if turns:
        most = min(map(arriving_by, plans))
        found = [_one_group_at_a_time(before, after, groups, itemsize, cost, parts) for parts in turns]
        plans += [plan for plan in found if arriving_by(plan) <= most]
    return cost.fastest(plans, itemsize)
