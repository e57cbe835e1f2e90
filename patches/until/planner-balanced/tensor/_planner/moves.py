"""Before all replicas may send."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .groups import Groups
    from .regions import Regions


def _in_one(before: Regions, after: Regions, axes: frozenset[int], groups: Groups) -> Iterator[tuple[Step, ...]]:
    """The plan with one collective; none without its group."""
    if not groups.has(axes):
        return
    # Narrowing is a view, and what is left is cut by the group alone.
    narrow = cut_toward(before, after, before.free)
    first = () if narrow == before else (Narrow(before, narrow),)
    group = tuple(sorted(axes))
    exchange = AllToAll(narrow, after, group)
    if all(old[: len(new)] == new for old, new in zip(narrow.orders, after.orders)):
        gather = AllGather(narrow, after, group)
        # Its cost would always be less than that of an all-to-all. But padding is sent, too, and takes memory: one row
        # that 64 ranks want is 64 rows in a gather.
        if arriving(gather) <= EXCHANGE * arriving(exchange):
            yield (*first, gather)
            return
    yield (*first, exchange)
