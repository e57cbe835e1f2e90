"""Say in the log, and in the trace that TORCH_TRACE asks for, what was planned."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch._logging import trace_structured

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("torch_overlay.transfers")


def tell(name: str, describe: Callable[[], str]) -> None:
    """A DEBUG line, and an artifact that tlparse shows by this name.

    Args:
        describe: gives the plan in words; called only if somebody wants to know.
    """
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("planned %s", describe())
    about = {"name": name, "encoding": "string"}
    trace_structured("artifact", lambda: about, payload_fn=describe, expect_trace_id=False)
