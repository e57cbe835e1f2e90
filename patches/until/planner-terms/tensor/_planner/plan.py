"""Before the target may have pending reductions that the source doesn't have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .cost import Cost
from .groups import Groups
from .regions import NotPlanned, Regions
from .steps import AllGather, AllReduce, AllToAll, Divide, Narrow, ReduceScatter, Step

NAMES: Mapping[type[Step], str] = {
    Narrow: "narrow",
    Divide: "divide",
    AllGather: "all_gather",
    AllReduce: "all_reduce",
    ReduceScatter: "reduce_scatter",
    AllToAll: "all_to_all",
}


def plan_at_once(
    source: Regions,
    target: Regions,
    itemsize: int,
    groups: Iterable[Iterable[int]] | None,
    cost: Cost,
) -> tuple[Step, ...]:
    """`plan`, with no step in rounds."""
    if (source.shape, source.sizes) != (target.shape, target.sizes):
        raise ValueError(f"no way from {source.shape} on {source.sizes} to {target.shape} on {target.sizes}")
    have = Groups.of(groups, source.sizes)
    if any(new and new != old for old, new in zip(source.partial, target.partial)):
        raise NotPlanned("the target is pending where the source isn't")
    return _reduce_and_move(source, target, have, itemsize, cost)
