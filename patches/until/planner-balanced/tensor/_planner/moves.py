"""Before all replicas may send."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .cost import Cost
    from .groups import Groups
    from .regions import Regions


def _in_one(
    before: Regions, after: Regions, axes: frozenset[int], groups: Groups, cost: Cost
) -> Iterator[tuple[Step, ...]]:
    """The plans with one collective; none without its group."""
    if not groups.has(axes):
        return
    # Narrowing is a view, and what is left is cut by the group alone.
    narrow = cut_toward(before, after, before.free)
    first = () if narrow == before else (Narrow(before, narrow),)
    group = tuple(sorted(axes))
    exchange = AllToAll(narrow, after, group)
    if all(old[: len(new)] == new for old, new in zip(narrow.orders, after.orders)):
        gather = AllGather(narrow, after, group)
        if gather.ranks * gather.chunk == after.most:
            yield (*first, gather)
            return  # no padding: an all-to-all would bring the same
        if arriving(gather) <= EXCHANGE * arriving(exchange):
            yield (*first, gather)
    yield (*first, exchange)
