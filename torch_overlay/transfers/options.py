"""`Options`: what a rank gives a `Transfer` beside its tensors, as one value that ranks compare. Imports no torch."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, NamedTuple

BUDGET = 256 << 20  # bytes that buffers may take, where a user says nothing
SAME = "strict", "keep", "timeout", "changes", "relay"  # of these all ranks give the same


class Options(NamedTuple):
    """The options of a `Transfer`, as its arguments describe them. The timeout is in seconds."""

    budget: int
    strict: bool = True
    keep: bool = False
    timeout: float | None = None
    changes: bool | str = False
    relay: bool | None = None
    host: str | None = None

    @staticmethod
    def checked(budget: Any, strict: Any, keep: Any, timeout: Any, changes: Any, relay: Any, host: Any) -> Options:
        """Check what a user gave."""
        if not (math.isfinite(budget) if isinstance(budget, float) else hasattr(budget, "__index__")):
            raise TypeError(f"budget= takes a whole number of bytes; got {budget!r}.")
        seconds = None if timeout is None else checked_timeout(timeout).total_seconds()
        if changes not in (True, False, "cpu"):
            raise ValueError(f'changes= takes True, False or "cpu"; got {changes!r}.')
        if host is not None and (not isinstance(host, str) or relay is False):
            raise ValueError(f"host= takes a name, and relay=False needs none; got {host!r} with relay={relay!r}.")
        # What ranks say is JSON, which has no truth of numpy's.
        changes, relay = changes if changes == "cpu" else bool(changes), None if relay is None else bool(relay)
        return Options(int(budget), bool(strict), bool(keep), seconds, changes, relay, host)


def checked_timeout(timeout: Any) -> timedelta:
    """Return what a user gave as `timeout=`, in seconds or as a timedelta, as a timedelta.

    >>> checked_timeout(2.5)
    datetime.timedelta(seconds=2, microseconds=500000)
    """
    try:
        limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        if isinstance(limit, timedelta) and limit > timedelta():
            return limit
    except (ValueError, OverflowError):  # not a number, or infinite
        pass
    raise ValueError(f"timeout= takes a number of seconds above 0, or a timedelta; got {timeout!r}.")
