"""Before reductions by all-to-alls."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .groups import Groups


def all_to_alls(exchange: Exchange, free: frozenset[int], groups: Groups) -> Iterator[AllToAll]:
    """The all-to-alls for an exchange, over groups with at least its axes, which the nearest senders need. A group with
    more axes is taken if it balances the senders, or if there is no other: where the nearest replicas would send much
    and others nothing, all of them can send; see `senders`.

    Only axes are added that are replicated in the source and cut the target: an axis whose placement stays takes no
    part. `free` is that of the source before it was narrowed.
    """
    before, after, axes, _ = exchange
    nearest = groups.has(axes)
    more = free & after.sharded
    if nearest and more:
        more = exchange.tied()
    if nearest and not more:
        yield AllToAll(before, after, axes)
        return
    for group in groups.between(axes, more.union(axes)):
        diagonals = exchange._replace(axes=group).diagonals()
        if diagonals or group == axes or not nearest:
            yield AllToAll(before, after, group, diagonals=diagonals)
