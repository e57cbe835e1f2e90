"""How long process groups wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed.distributed_c10d import ProcessGroup


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """How long the collectives of a group wait; None if that isn't known, or if it is the default of the group's
    backend: a group on another backend has another default."""
    constant = distributed_c10d._get_default_timeout(distributed_c10d.get_backend(group))
    for device in group._device_types:
        try:
            timeout: timedelta = group._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):
            continue  # a backend without options
        return None if timeout == constant else timeout
    return None
