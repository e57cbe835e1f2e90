"""Say which redistribution waits for other ranks: where only some ranks call it, it
hangs until the timeout of the backend, and nothing else says so.

`watched` notes each redistribution while it runs, which costs a microsecond and talks
to nobody. A thread looks at the notes every second, and logs one line about one
that is older than `SECONDS`. The thread ends when nothing runs, so a program that
doesn't redistribute has none.

What waits outside of the call isn't seen: a pending result (``async_op=True``),
compiled code, and streams of a GPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..._mesh.compare import NAME
from ..._mesh.text import of_ranks
from .at_hand import members_along

if TYPE_CHECKING:
    from types import FrameType

    from torch.distributed.tensor._dtensor_spec import DTensorSpec


SECONDS = 5.0  # how long a redistribution runs before it is reported
logger = logging.getLogger(__name__)

# What each thread runs now: since when, from which spec to which.
_running: dict[int, tuple[float, DTensorSpec, DTensorSpec]] = {}
_watch: threading.Thread | None = None


class watched:
    """Note a redistribution while this block runs.

    Args:
        source, target: its specs.
    """

    # A class with slots, not a generator: it enters and leaves in half of the time.
    __slots__ = ("note", "thread")

    def __init__(self, source: DTensorSpec, target: DTensorSpec) -> None:
        self.note = time.monotonic(), source, target
        self.thread = threading.get_ident()

    def __enter__(self) -> None:
        _running[self.thread] = self.note
        if _watch is None:
            _start()

    def __exit__(self, *_: object) -> None:
        _running.pop(self.thread, None)


def _start() -> None:
    global _watch
    _watch = threading.Thread(target=_look, name="redistributions", daemon=True)
    _watch.start()


def _look() -> None:
    """Report what runs for `SECONDS`, once each, until nothing runs."""
    global _watch
    told: set[tuple[int, float]] = set()
    while True:
        time.sleep(SECONDS / 5)
        told = _report(told)
        if not _running:
            # Who notes something from here on starts another thread.
            _watch = None
            if not _running:
                return
            _watch = threading.current_thread()


def _report(told: set[tuple[int, float]]) -> set[tuple[int, float]]:
    """Log what has run for `SECONDS`, unless told before, and return all that was told
    and still runs. Nothing here may outlive the call: a note holds a mesh and its
    groups."""
    late = set()
    for thread, note in [*_running.items()]:
        if time.monotonic() - note[0] < SECONDS:
            continue
        late.add((thread, note[0]))
        if (thread, note[0]) not in told:
            # It only informs, so a failure here must not end the thread.
            with contextlib.suppress(Exception):
                logger.warning(_describe(thread, note))
    return late


def _describe(thread: int, note: tuple[float, DTensorSpec, DTensorSpec]) -> str:
    since, source, target = note
    mesh, rank = source.mesh, dist.get_rank()
    pairs = enumerate(zip(source.placements, target.placements))
    axes = [axis for axis, (old, new) in pairs if old != new]
    others = [other for other in members_along(mesh, axes) if other != rank]
    ends = " -> ".join(
        ", ".join(map(str, spec.placements)) for spec in (source, target)
    )
    meta = source.tensor_meta
    tensor = f"{meta.dtype} of shape {tuple(meta.shape)}" if meta else "a tensor"
    return (
        f"{NAME}Rank {rank} has waited {time.monotonic() - since:.0f} s for "
        f"{of_ranks(others)} in a redistribution of {tensor} from {ends} on {mesh}"
        f"{_where(thread)}. All of these ranks must call it: see whether they do, are "
        "late or have died. It waits on, as long as the timeout allows."
    )


def _where(thread: int) -> str:
    """Where in the user's program a thread is, as ", called at train.py:12, in step";
    empty for a thread of autograd's own."""
    ours = [os.path.dirname(torch.__file__)]
    ours.append(__file__[: __file__.rindex("distributed")])  # overlay only
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(tuple(ours)):
            return f", called at {code.co_filename}:{frame.f_lineno}, in {code.co_name}"
        frame = frame.f_back
    return ""


def _forget() -> None:
    """Forget the threads of the parent, in a forked child."""
    global _watch
    _watch = None
    _running.clear()


os.register_at_fork(after_in_child=_forget)
