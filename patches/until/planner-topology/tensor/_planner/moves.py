"""Before the speed of the axes may be known."""

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
    if not groups.has(axes):
        # More collectives that bring no more may be faster: a group over more axes than need be has more latency.
        most = min(map(arriving_by, plans))
        found = _one_group_at_a_time(before, after, groups, itemsize, cost)
        if arriving_by(found) <= most:
            plans.append(found)
    return cost.fastest(plans, itemsize)


def _one_group_at_a_time(
    before: Regions, after: Regions, groups: Groups, itemsize: int, cost: Cost
) -> tuple[Step, ...]:
    """One group at a time: from the inside out, give up the cuts that the target doesn't have, and make those that it
    has as soon as they fit.

    For example, S0·S1 to S1·S0 on (2, 2), without their joint group: an all-gather gives up the cut of dim 0 by axis 0,
    R·S1. The cut of dim 1 by axis 0 doesn't fit yet, since axis 1 cuts that dim and the target has axis 0 alone there.
    Then an all-to-all over axis 1 gives up that cut and makes both that the target has, S1·S0.
    """
    steps: list[Step] = []
    now = before
    while crossed(now, after):
        made, now = next_collective(now, after, groups, itemsize, cost)
        steps += made
    return (*steps, *(() if now == after else (Narrow(now, after),)))


def next_collective(
    now: Regions, after: Regions, groups: Groups, itemsize: int, cost: Cost
) -> tuple[tuple[Step, ...], Regions]:
    """One collective on the way to `after`, and where it leads."""
    then = _next_boxes(now, after, groups)
    axes = crossed(now, then)
    if not axes:
        return (Narrow(now, then),), then
    return cost.fastest(list(_in_one(now, then, axes, groups)), itemsize), then


def _next_boxes(now: Regions, after: Regions, groups: Groups) -> Regions:
    # By the group that gives up most cuts; of equals the one that leaves the smallest boxes.
    wrong = misplaced(now, after)
    found = []
    for group in groups.within(wrong):
        popped = _without(now, after, group)
        then = cut_toward(popped, after, popped.free)
        if popped.sharded.isdisjoint(group) and (len(group) == 1 or groups.has(crossed(now, then))):
            found.append((-len(group), then.most, -_unblocked(now, after, group), groups.count(group), group, then))
    if found:
        return min(found)[-1]
    # Not reached: of a dim with misplaced cuts the innermost is one, and its axis has a group.
    raise AssertionError(
        f"from {now} to {after} the cuts by {sorted(wrong)} have to go, and no group at hand gives any of them up"
    )
