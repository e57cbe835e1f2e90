"""More ways to reduce: functions that begin plans for `Reduction`, as its methods do. They are apart from the class
since they need helpers and little of what it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .moves import all_to_alls, common, crossed, cut_toward, next_collective
from .senders import Exchange
from .steps import Divide, Narrow, ReduceScatter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .reductions import Beginning, Reduction
    from .regions import Regions
    from .steps import Step


def in_one(asked: Reduction) -> Iterator[Beginning]:
    """One all-to-all that brings every rank all terms of what it wants; it adds them up itself. That is best where each
    rank wants little.

    For example, a (16, 16) tensor of 4-byte elements goes from R·S0·P to R·S1·S1 on (2, 2, 2). That is
    all_to_all(b,c) sum 384 B; without this function it would be reduce_scatter(c) 256 B, all_to_all(b,c) 192 B.
    """
    if asked.groups.has(asked.axes | asked.crossed):
        yield from _exchanges(asked, asked.after)


def _exchanges(asked: Reduction, then: Regions) -> Iterator[Beginning]:
    """All-to-alls to these boxes that bring each rank all terms. Those of an average are divided before they are sent:
    their sum may be more than a short floating-point number can be."""
    group, reduced = (tuple(sorted(axes)) for axes in (asked.axes | crossed(asked.before, then), asked.axes))
    op, mean = (asked.op, ()) if asked.op != "avg" else ("sum", (Divide(asked.groups.count(reduced)),))
    for step in all_to_alls(Exchange(asked.before, then, group, reduced), asked.before.free, asked.groups, op):
        yield (*mean, step), then


def one_group_at_a_time(asked: Reduction) -> Iterator[Beginning]:
    """Reduce-scatter as soon as the cut fits. Where none fits, all-reduce at once, or move on until one does; what
    doesn't cut the target is all-reduced in the end.

    For example, a (64, 64) tensor of 4-byte elements goes from P·P·S0 to S0·R·S1 on (2, 2, 2). Without joint groups
    that is all_to_all(c), reduce_scatter(a), all_reduce(b), 4096 B each.
    """
    if asked.groups.has(asked.axes | asked.crossed):
        return  # the other ways take no more than two
    for early in (True, False):
        steps: list[Step] = []
        now = asked.before
        while asked.axes & now.pending:
            made, now = _reduce_or_move(asked, now, early)
            steps += made
        yield tuple(steps), now


def _reduce_or_move(asked: Reduction, now: Regions, early: bool) -> Beginning:
    narrow = cut_toward(now, asked.after, now.free)
    first = () if narrow == now else (Narrow(now, narrow),)
    left = asked.axes & now.pending
    for group in asked.groups.within(left):
        then = cut_toward(narrow.without_pending(group), asked.after, narrow.free.union(group))
        if then.sharded.issuperset(group):
            return (*first, ReduceScatter(narrow, then, group, asked.op)), then
    if early or left.isdisjoint(asked.after.sharded):
        return (*first, *asked.all_reduce(narrow, narrow, left)), narrow.without_pending(left)
    made, then = next_collective(narrow, asked.after, asked.groups, asked.itemsize, asked.cost)
    return (*first, *made), then


def exchanged(asked: Reduction) -> Iterator[Beginning]:
    """Where only a group over all axes that talk is at hand: by that group, each rank gets all terms of a part that
    no other rank has, and adds them up itself; then the parts move.

    In the example of `one_group_at_a_time`, with all joint groups: reduce_scatter(a,b) 6144 B, all_to_all(a,b,c)
    4096 B. With the group over a, b and c alone: all_to_all(a,b,c) sum 8192 B, all_gather(b) 2048 B; `in_one` would
    bring 16384 B.
    """
    group = asked.axes | asked.crossed
    if asked.groups.has(asked.axes) or not asked.groups.has(group):
        return
    orders = zip(asked.before.orders, asked.after.orders)
    start = asked.before.cut([old[: common(old, new)] for old, new in orders]).without_pending(asked.axes)
    like = cut_toward(start, asked.after, start.free)
    first = asked.scatters.spread(like, sorted(group - like.sharded))
    for cut in dict.fromkeys((first, *asked.scatters.movable(start, group))):
        if asked.groups.has(asked.axes | crossed(asked.before, cut)):
            yield from _exchanges(asked, cut)
