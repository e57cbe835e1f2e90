"""What a run of a `Transfer` took on one rank (`RunStats`), and how far it is (`Progress`). Imports no torch."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ..show.words import counted, size_text

logger = logging.getLogger(__name__)
SECONDS = 0.5  # between two words of progress


class Progress:
    """Tells a function of the user how far a run is, at most each half second, and at its end.

    Args:
        call: gets the bytes that this rank has sent and got, and those of the whole run.
        total: of the whole run.
    """

    def __init__(self, call: Callable[[int, int], object], total: int) -> None:
        self._call, self._total, self._done, self._told = call, total, 0, 0.0
        self._is_ended = False

    def add(self, size: int) -> None:
        """Note that so many bytes more were sent and got. Messages are rounded up, and their sum is not."""
        self._done = min(self._done + size, self._total)
        now, self._is_ended = time.monotonic(), self._done == self._total
        if self._told < math.inf and (now - self._told >= SECONDS or self._is_ended):
            self._told = now
            try:
                self._call(self._done, self._total)
            except Exception:  # a bar that breaks shouldn't end the run of all ranks
                logger.warning("progress= of a Transfer raised, and isn't called any more in this run", exc_info=True)
                self._told = math.inf

    def end(self) -> None:
        """Note that the run is over, also one in which nothing was sent."""
        if not self._is_ended:
            self.add(self._total - self._done)


def added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up the seconds of several parts, by what was done.

    >>> added([{"pack": 1.0}, {"pack": 2.0, "wait": 4.0}])
    {'pack': 3.0, 'wait': 4.0}
    """
    seconds: dict[str, float] = {}
    for part in parts:
        for what, took in part.items():
            seconds[what] = seconds.get(what, 0.0) + took
    return seconds


class RunStats(NamedTuple):
    """What the last run of a `Transfer` took on this rank. Prints as a line.

    >>> print(RunStats(3, {"check": 0.0001, "agree": 0.002, "wait": 1.5}, 2, 4096, 0))
    1.502 s (agree 0.002, wait 1.500); sent 4 KiB and got 0 B in 2 exchanges

    Attributes:
        version: as ranks gave it to `run`; None if none did.
        seconds: for what this rank did, in the order in which it began: "check" its tensors, "agree" with all ranks on
            whether they run, "plan" names that no run had before (with the digests of replicas, where they are
            compared), and, summed over all exchanges, "pack", "send", "wait", "unpack"; with `changes` also "compare",
            "say what changed" and "choose the way", of a checkpoint "read", with `stages` "stages", on a GPU "on the
            device", where most of the others is launching.
        exchanges: how many there were.
        sent_bytes, received_bytes: to and from other ranks.
    """

    version: int | None
    seconds: Mapping[str, float]
    exchanges: int
    sent_bytes: int
    received_bytes: int

    def __str__(self) -> str:
        took = ", ".join([f"{what} {seconds:.3f}" for what, seconds in self.seconds.items() if seconds >= 0.0005])
        traffic = f"sent {size_text(self.sent_bytes)} and got {size_text(self.received_bytes)}"
        what = f" ({took})" if took else ""
        return f"{sum(self.seconds.values()):.3f} s{what}; {traffic} in {counted(self.exchanges, 'exchange')}"
