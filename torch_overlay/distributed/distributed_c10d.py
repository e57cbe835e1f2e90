"""Bodies that replace functions of ``torch.distributed.distributed_c10d``, named as
what they replace."""

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
    """Names by how often exactly these ranks made a group, the same on all of them,
    whatever other groups they made.

    >>> one, other = MemberNames(), MemberNames()
    >>> _ = other.next([4, 6])  # rank 4 made a group of which rank 5 knows nothing
    >>> one.next([4, 5]) == other.next([4, 5])  # and they still meet under one name
    True
    """

    def __init__(self, what: str = "group") -> None:
        self._what = what
        self._made: Counter[Sequence[int]] = Counter()

    def next(self, ranks: Sequence[int]) -> str:
        """A name for the next group of these ranks, in this order."""
        made = compact(ranks)
        self._made[made] += 1
        text = f"{self._what} {self._made[made]} of ranks {made}"
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


_names_by_world: weakref.WeakKeyDictionary[Any, MemberNames] = (
    weakref.WeakKeyDictionary()
)


def member_names(world: Any) -> MemberNames:
    """The names of a world, by its default group; without one it is the world itself
    that is named."""
    if world is None:
        return MemberNames("world")
    with _names_lock:
        return _names_by_world.setdefault(world, MemberNames())


def compact(ranks: Sequence[int]) -> tuple[int, ...] | range:
    """Ranks as a value; consecutive ones, of which there may be a million, as a
    range."""
    run = range(ranks[0], ranks[0] + len(ranks)) if ranks else range(0)
    return run if ranks and list(run) == list(ranks) else tuple(map(int, ranks))


def _process_group_name(
    ranks: list[int], use_hashed_name: bool, to_global: dict[int, int] | None = None
) -> GroupName:
    """The name of a group about to be made, the same on every rank that takes part.

    A group that only its members make must be named from what all of its members know.
    A counter of the process, of the groups it is in or of the calls it made, drifts
    apart as soon as some ranks make a group and others don't. How often *these* ranks
    have made a group is the same on all of them, whatever else any of them did. The
    counter behind the other names is left to calls that every rank makes.

    Args:
        to_global: of a split, the world's rank for each of its parent, in which
            ``ranks`` count.
    """
    if use_hashed_name:
        if to_global is not None:
            ranks = [to_global[rank] for rank in ranks]
        return distributed_c10d.GroupName(
            member_names(distributed_c10d._world.default_pg).next(ranks)
        )
    name = distributed_c10d.GroupName(str(distributed_c10d._world.group_count))
    distributed_c10d._world.group_count += 1
    return name


def _timeout_of(group: ProcessGroup) -> timedelta | None:
    """How long the collectives of a group wait; None if that isn't known, or if it is
    the default of the group's backend, also where the user gave just that: a group on
    another backend has another default."""
    constant = distributed_c10d._get_default_timeout(
        distributed_c10d.get_backend(group)
    )
    for device in group._device_types:
        try:
            timeout: timedelta = group._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):
            continue  # a backend without options
        return None if timeout == constant else timeout
    return None
