"""How long process groups wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed.distributed_c10d import ProcessGroup


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """How long the collectives of a group wait; None if no backend of it says so."""
    for device in group._device_types:
        try:
            return group._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):
            continue  # a backend without options
    return None
