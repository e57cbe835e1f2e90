"""A mesh's group waits as long as the default group does, unless the user says otherwise for its dim."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed.distributed_c10d import ProcessGroup


def _timeout_of(group: ProcessGroup) -> timedelta | None:
    """How long the collectives of a group wait; None if no backend of it says so."""
    for device in group._device_types:
        try:
            return group._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):
            continue  # a backend without options
    return None


class DeviceMesh:
    def _init_one_process_group():
        if timeout is None:
            timeout = _timeout_of(_get_default_group())
        group_desc = ...
