"""One log line for whatever waits or works for longer than `LONG` seconds: what, for which ranks, for how long.

The same line everywhere: `meet` (`place.py`) and making a `Transfer` (`meeting.py`), runs (`watch.py`), and what one
process does by itself (`said_if_long`). It begins as that of meshes does (`distributed/_mesh/compare.py`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

import torch.distributed as dist

from ..distributed._mesh.text import of_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LONG = 5.0  # seconds
SHOWN = 8  # ranks of which the line says what they do
LAST_MEETING = "torch_overlay/last_meeting"  # begins the keys under which ranks say where they came last
logger = logging.getLogger(__name__)


def say_wait(
    rank: int, seconds: float, ranks: Sequence[int], where: str, limit: float, doing: Mapping[int, str] | None = None
) -> None:
    """Log that a rank waits for others.

    >>> with contextlib.redirect_stderr(sys.stdout):  # doctest: +SKIP
    ...     say_wait(0, 5.0, [1], "run 2 of a Transfer over ranks 0, 1", 300.0)
    torch_overlay: Rank 0 has waited 5 s for rank 1, in run 2 of a Transfer over ranks 0, 1. It waits up to 300 s.
    """
    who = of_ranks(ranks) if ranks else "other ranks"
    words = [f"rank {each}: {does}" for each, does in (doing or {}).items()][:SHOWN]
    said = f" ({'; '.join(words)})" if words else ""
    until = f"It waits up to {limit:g} s."
    logger.warning(
        "torch_overlay: Rank %s has waited %.0f s for %s%s, in %s. %s", rank, seconds, who, said, where, until
    )


def say_work(rank: int | None, seconds: float, what: str) -> None:
    """Log that a rank works on something, and waits for nobody. Without a rank, that this process does."""
    who = "This process" if rank is None else f"Rank {rank}"
    logger.warning("torch_overlay: %s has worked %.0f s, and waits for no rank: %s.", who, seconds, what)


@contextlib.contextmanager
def said_if_long(what: str) -> Iterator[None]:
    """Run a block that works without other ranks. If it takes longer than LONG seconds, log so once, and go on."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else None
    timer = threading.Timer(LONG, say_work, (rank, LONG, what))
    timer.daemon = True  # a process that ends must not wait for it
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
