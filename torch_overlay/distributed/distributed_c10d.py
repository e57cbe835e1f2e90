"""Functions of ``torch.distributed.distributed_c10d``, under the names that they
replace.

Start at `_process_group_name`: it names a group that only its members create, so that
all of them find each other in the store.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from torch.distributed.distributed_c10d import GroupName, ProcessGroup


_names_lock = threading.Lock()


class MemberNames:
    """Names for groups that only their members create. A name counts how often exactly
    these ranks created a group. That number is the same on all of them, whatever other
    groups they created.

    >>> one, other = MemberNames(), MemberNames()
    >>> _ = other.next([4, 6])  # rank 4 made a group of which rank 5 knows nothing
    >>> one.next([4, 5]) == other.next([4, 5])  # and they still meet under one name
    True
    """

    def __init__(self, what: str = "group") -> None:
        self._what = what
        self._count: Counter[Sequence[int]] = Counter()

    def next(self, ranks: Sequence[int]) -> str:
        """The name of the next group of these ranks, in this order; counts each
        call."""
        key = compact(ranks)
        self._count[key] += 1
        text = f"{self._what} {self._count[key]} of ranks {key}"
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


_names_by_world: weakref.WeakKeyDictionary[Any, MemberNames] = (
    weakref.WeakKeyDictionary()
)


def member_names(world: Any) -> MemberNames:
    """The names of a world, by its default group; without one each call counts from 1
    on."""
    if world is None:
        return MemberNames("world")
    with _names_lock:
        return _names_by_world.setdefault(world, MemberNames())


def compact(ranks: Sequence[int]) -> tuple[int, ...] | range:
    """Ranks as a hashable value, consecutive ones as a range: there may be a
    million."""
    consecutive = range(ranks[0], ranks[0] + len(ranks)) if ranks else range(0)
    return (
        consecutive
        if ranks and list(consecutive) == list(ranks)
        else tuple(map(int, ranks))
    )


def _process_group_name(
    ranks: list[int], use_hashed_name: bool, to_global: dict[int, int] | None = None
) -> GroupName:
    """Return the name of a new group, the same on all its ranks. Counts the call."""
    # If only the members create the group, a counter of the process drifts apart as
    # soon as some ranks create a group and others don't. How often exactly these ranks
    # created a group is the same on all of them. The counter `group_count` behind the
    # other names is left to calls that every rank makes.
    if use_hashed_name:
        # Two splits of different parents may have the same local ranks, [0, 1] say, and
        # would get one name.
        if to_global is not None:
            ranks = [to_global[rank] for rank in ranks]
        return distributed_c10d.GroupName(
            member_names(distributed_c10d._world.default_pg).next(ranks)
        )
    name = distributed_c10d.GroupName(str(distributed_c10d._world.group_count))
    distributed_c10d._world.group_count += 1
    return name


def _timeout_of(group: ProcessGroup) -> timedelta | None:
    """The timeout of a group's collectives. None if its backend has no options, or if
    it is the backend's default, even if the user chose just that value."""
    backend_default = distributed_c10d._get_default_timeout(
        distributed_c10d.get_backend(group)
    )
    for device in group._device_types:
        try:
            timeout: timedelta = group._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):
            continue  # a backend without options
        # A caller passes it on to a group that may be on another backend, which has
        # another default.
        return None if timeout == backend_default else timeout
    return None
