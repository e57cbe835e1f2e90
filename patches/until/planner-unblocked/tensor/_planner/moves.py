"""Before cuts in the way of others go first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .groups import Groups
    from .regions import Regions


def _next_boxes(now: Regions, after: Regions, groups: Groups) -> Regions:
    # By the group that gives up most cuts; of equals the one that leaves the smallest boxes.
    wrong = misplaced(now, after)
    found = []
    for group in groups.within(wrong):
        popped = _without(now, after, group)
        then = cut_toward(popped, after, popped.free)
        if popped.sharded.isdisjoint(group) and (len(group) == 1 or groups.has(crossed(now, then))):
            found.append((-len(group), then.most, groups.count(group), group, then))
    if found:
        return min(found)[-1]
    # Not reached: of a dim with misplaced cuts the innermost is one, and its axis has a group.
    raise AssertionError(
        f"from {now} to {after} the cuts by {sorted(wrong)} have to go, and no group at hand gives any of them up"
    )
