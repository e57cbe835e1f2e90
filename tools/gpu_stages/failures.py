"""A rank that dies or stops within an exchange of a `Transfer`: the others name it in the timeout and five seconds."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from . import RANKS, Check, Found, Run, asked

TIMEOUT, VICTIM = 5.0, RANKS - 1
KINDS = ("killed", "stopped")
PLACES = ("exchange 2 of .*, send", "connecting")  # a step of a run; or before the group's first collective


def failures(run: Run) -> Iterator[Found]:
    for bound in (False, True)[: 1 if run.dry else 2]:
        for place in PLACES:
            for kind in KINDS:
                checks = [Check(who_is_named, (kind, place), dies=(VICTIM,))]
                yield from asked(run, checks, run.best, bound=bound)


# --- on every rank


def who_is_named(mesh: Any, rank: int, kind: str, place: str) -> dict[str, Any] | str | None:
    """In how many seconds this rank was told which rank is missing, and those of closing the Transfer after that."""
    from torch.distributed import distributed_c10d

    from torch_overlay import Transfer
    from torch_overlay.rendezvous.team import Team
    from torch_overlay.rendezvous.watch import Watch

    store = distributed_c10d._get_default_store()
    if rank == VICTIM:
        store.set(f"victim {kind} {place}", str(os.getpid()))
    tensors = [torch.full((1 << 16,), float(rank == 0), device=mesh.device_type)]
    sides = (tensors, None) if rank == 0 else (None, tensors)
    is_early = place == "connecting"
    enter, connect, fails = Watch.enter, Team.connect, [is_early]

    def die() -> None:
        fails.clear()
        os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)

    def enters(watch: Any, text: str, waits: bool = False) -> None:
        enter(watch, text, waits)
        if rank == VICTIM and fails == [True] and re.fullmatch(place, text):
            die()

    def connects(team: Any) -> None:
        if rank == VICTIM and is_early:
            die()
        connect(team)

    begun, said, sync = time.monotonic(), "no error", None
    with mock.patch.object(Watch, "enter", enters), mock.patch.object(Team, "connect", connects):
        try:
            sync = Transfer(*sides, budget=1 << 16, timeout=TIMEOUT)
            sync.run()
            fails[:] = [True]
            begun = time.monotonic()
            sync.run()
        except RuntimeError as error:
            said = str(error)
    seconds = time.monotonic() - begun
    if rank == VICTIM:
        return None  # it was woken
    begun = time.monotonic()
    if sync is not None:
        sync.close()
    figures = {"seconds": round(seconds, 2), "to close": round(time.monotonic() - begun, 2)}
    if kind == "stopped" and rank == 0:
        os.kill(int(store.get(f"victim {kind} {place}")), signal.SIGCONT)
    if f"no answer any more from rank {VICTIM}" not in said:
        return f"{figures}: {said}"
    late = seconds > (10 if is_early else TIMEOUT) + 5  # ranks get 10 s to connect
    return f"late: {figures}" if late else figures
