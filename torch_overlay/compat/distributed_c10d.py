"""Names of groups, and groups that keep the order of their ranks, on released ``distributed_c10d``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.distributed import distributed_c10d

from ..distributed._torch import making_for_mesh
from ..distributed.distributed_c10d import MemberNames
from ..distributed.distributed_c10d import _process_group_name as named_by_members

# How often the same ranks were split from a group, by world. `_process_group_name` gets the ranks of a split inside its
# parent, but not the parent, so splits of different parents share a count.
_splits: weakref.WeakKeyDictionary[Any, MemberNames] = weakref.WeakKeyDictionary()


def _process_group_name(ranks: list[int], use_hashed_name: bool) -> distributed_c10d.GroupName:
    """As upstream's, except that a group that is split from another one is counted by its parent there."""
    world = distributed_c10d._world.default_pg
    if use_hashed_name and world is not None and not making_for_mesh.get():
        return distributed_c10d.GroupName(_splits.setdefault(world, MemberNames("split")).next(ranks))
    return named_by_members(ranks, use_hashed_name)


class _OrderedRank(int):
    """A rank that compares by its position in a list, so sorting the list changes nothing."""

    position: int

    def __lt__(self, other: int) -> bool:
        return self.position < other.position if isinstance(other, _OrderedRank) else int(self) < other


def _in_order(ranks: Iterable[int]) -> list[_OrderedRank]:
    """Ranks that compare by their places in this list, so that new_group, which sorts them, keeps the order."""
    ordered = list(map(_OrderedRank, ranks))
    for position, rank in enumerate(ordered):
        rank.position = position
    return ordered


def install_sort_ranks() -> tuple[Any, Any]:
    """Before 2.12, let `new_group` take ``sort_ranks=False``, with which a group keeps the order of its ranks. It is
    decorated, so its code can't be swapped: modules that imported it before keep torch's. Returns ours and torch's."""
    torchs = distributed_c10d.new_group

    def new_group(ranks: Any = None, *arguments: Any, sort_ranks: bool = True, **keywords: Any) -> Any:
        if sort_ranks or ranks is None:
            return torchs(ranks, *arguments, **keywords)
        group = torchs(_in_order(ranks), *arguments, **keywords)
        all_ranks = distributed_c10d._world.pg_group_ranks
        if group in all_ranks:  # plain ints, since these are pickled and sent to other processes
            all_ranks[group] = {int(rank): position for rank, position in all_ranks[group].items()}
        return group

    distributed_c10d.new_group = new_group
    return new_group, torchs


def uninstall_sort_ranks(functions: tuple[Any, Any]) -> None:
    """Undo `install_sort_ranks`, unless somebody replaced our function meanwhile."""
    ours, torchs = functions
    if distributed_c10d.new_group is ours:
        distributed_c10d.new_group = torchs
