"""Before timeouts are inherited."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import timedelta

    from ._process_groups import Request


def _timeout(request: Request) -> timedelta | None:
    """The timeout that the user gave for the axis; None for the backend's own."""
    options = request.override[1]
    return None if options is None else options._timeout
