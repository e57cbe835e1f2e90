"""What later releases have in ``torch.distributed.distributed_c10d``, and bodies ask for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.distributed import distributed_c10d

from ..distributed._torch import making_for_mesh
from ..distributed.distributed_c10d import MemberNames
from ..distributed.distributed_c10d import _process_group_name as named_by_members

# A split counts its ranks inside its parent, and doesn't say which parent that is.
_splits: weakref.WeakKeyDictionary[Any, MemberNames] = weakref.WeakKeyDictionary()


def _process_group_name(ranks: list[int], use_hashed_name: bool) -> distributed_c10d.GroupName:
    """As ours upstream, with another count for the splits of a parent that isn't known."""
    world = distributed_c10d._world.default_pg
    if use_hashed_name and world is not None and not making_for_mesh.get():
        return distributed_c10d.GroupName(_splits.setdefault(world, MemberNames("split")).next(ranks))
    return named_by_members(ranks, use_hashed_name)


class _Placed(int):
    """A rank that sorts by its place, so that sorting a list of these changes nothing."""

    place: int

    def __lt__(self, other: int) -> bool:
        return self.place < other.place if isinstance(other, _Placed) else int(self) < other


def _placed(ranks: Iterable[int]) -> list[_Placed]:
    made = list(map(_Placed, ranks))
    for place, rank in enumerate(made):
        rank.place = place
    return made


def take_sort_ranks() -> tuple[Any, Any]:
    """Before 2.12, let bodies make groups that hold their ranks in the order given: torch sorts them there.

    The function has a decorator around it, so its code can't be swapped; other modules go on with torch's own.
    """
    torchs = distributed_c10d.new_group

    def new_group(ranks: Any = None, *given: Any, sort_ranks: bool = True, **named: Any) -> Any:
        if sort_ranks or ranks is None:
            return torchs(ranks, *given, **named)
        group = torchs(_placed(ranks), *given, **named)
        books = distributed_c10d._world.pg_group_ranks
        if group in books:  # by plain numbers: they leave the process, in pickles
            books[group] = {int(rank): place for rank, place in books[group].items()}
        return group

    distributed_c10d.new_group = new_group
    return new_group, torchs


def forget_sort_ranks(taken: tuple[Any, Any]) -> None:
    """Take it back, unless somebody put something over it."""
    ours, torchs = taken
    if distributed_c10d.new_group is ours:
        distributed_c10d.new_group = torchs
