"""A mesh's group waits as long as the default group does, unless the user says otherwise for its dim."""

from __future__ import annotations

from .distributed_c10d import _timeout_of


class DeviceMesh:
    def _init_one_process_group():
        new_group(..., timeout=timeout)
        if timeout is None:
            timeout = _timeout_of(_get_default_group())
        group_desc = ...
