"""Bodies that replace functions of ``torch.distributed.distributed_c10d``, named as what they replace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d

from ._groups.names import member_names

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed.distributed_c10d import GroupName, ProcessGroup


def _process_group_name(ranks: list[int], use_hashed_name: bool, to_global: dict[int, int] | None = None) -> GroupName:
    """The name of a group about to be made, the same on every rank that takes part.

    A group that only its members make must be named from what all of its members know. A counter of the process, of the
    groups it is in or of the calls it made, drifts apart as soon as some ranks make a group and others don't. How often
    *these* ranks have made a group is the same on all of them, whatever else any of them did. The counter behind the
    other names is left to calls that every rank makes.

    Args:
        to_global: of a split, the world's rank for each of its parent, in which ``ranks`` count.
    """
    if use_hashed_name:
        if to_global is not None:
            ranks = [to_global[rank] for rank in ranks]
        return distributed_c10d.GroupName(member_names(distributed_c10d._world.default_pg).next(ranks))
    name = distributed_c10d.GroupName(str(distributed_c10d._world.group_count))
    distributed_c10d._world.group_count += 1
    return name


def _timeout_of(group: ProcessGroup) -> timedelta | None:
    """How long the collectives of a group wait; None if that isn't known, or if it is the default of the group's
    backend, also where the user gave just that: a group on another backend has another default."""
    constant = distributed_c10d._get_default_timeout(distributed_c10d.get_backend(group))
    for device in group._device_types:
        try:
            timeout: timedelta = group._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):
            continue  # a backend without options
        return None if timeout == constant else timeout
    return None
