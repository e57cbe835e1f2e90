"""A run: what ranks report before it, and the handle of one in the background."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .comparison import by_sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .team import Team

    Job = Callable[[Callable[[], None]], None]  # calls what it is given when no source is read any more


NO_VERSION = -(1 << 62)  # travels in place of a version


def checked_names(only: Any) -> tuple[tuple[str, ...] | None, list[str]]:
    """Check what the user gave as `only=`. Raises nothing: a problem goes into the rank's report."""
    if only is None:
        return None, []
    # A string is iterable, too, and a name that was given without a list around it would be taken for its letters.
    names: list[Any] = [*only] if isinstance(only, Iterable) and not isinstance(only, str) else [None]
    if not all(isinstance(name, str) for name in names):
        return None, [f"only= takes several names, and got {only!r}"]
    return tuple(sorted({*names})), []


def checked_version(version: Any) -> tuple[int | None, list[str]]:
    """Check what the user gave as `version=`. Raises nothing: a problem goes into the rank's report."""
    if version is None or (isinstance(version, int) and abs(version) < -NO_VERSION):
        return version, []
    return None, [f"version= takes a whole number of less than 63 bits, and got {version!r}"]


class RunDecision(NamedTuple):
    """What the reports of all ranks come to; the same on all ranks.

    Attributes:
        problems: why which ranks can't run, in words; the run goes on if there are none.
        version: what the sources gave as `version=`; None if they gave none.
        is_background: True if some rank runs in the background. All ranks then compare, at the end, whether sources
            changed meanwhile.
        need_whole: the ranks that need everything whole, since they lack what was sent to them last.
        are_ties_apart: True if on some rank the sources of targets that are one block of memory are not.
    """

    problems: list[str]
    version: int | None = None
    is_background: bool = False
    need_whole: frozenset[int] = frozenset()
    are_ties_apart: bool = False


class RunReport(NamedTuple):
    """What a rank tells the others before a run, while nothing has been sent.

    Attributes:
        problems: why it can't run, in words.
        only: the names of the tensors to move, in order; None for all.
        version: as the rank gave it to `run`; None if it gave none.
        checks: whether it gave `check=True`.
        is_background: whether it gave `async_op=True`.
        needs_whole: whether its targets may differ from what was sent to it last, so that changes alone aren't enough.
        are_ties_apart: whether its sources of targets that are one block of memory are not, so that their values may
            differ.
    """

    problems: Sequence[str]
    only: tuple[str, ...] | None = None
    version: int | None = None
    checks: bool = False
    is_background: bool = False
    needs_whole: bool = False
    are_ties_apart: bool = False

    def agree(self, team: Team) -> RunDecision:
        """Exchange the reports of all ranks, and decide whether and how they run. Collective.

        If nothing is wrong, each rank sends seven integers. Otherwise ranks then also exchange the text of their
        problems.
        """
        only = 0 if self.only is None else 1 + zlib.crc32("\0".join(self.only).encode())
        version = NO_VERSION if self.version is None else self.version
        flags = self.checks, self.is_background, self.needs_whole, self.are_ties_apart
        rows = team.gather([len(self.problems), only, version, *map(int, flags)])
        problem_counts, onlys, versions, checks, background, _, apart = [{*column} for column in zip(*rows)]
        versions -= {NO_VERSION}
        if problem_counts == {0} and len(onlys) == len(checks) == 1 and len(versions) < 2:
            need_whole = frozenset(rank for rank, (*_, needs_whole, _) in zip(team.ranks, rows) if needs_whole)
            return RunDecision([], next(iter(versions), None), 1 in background, need_whole, 1 in apart)
        said = [*self.problems]
        if len(onlys) > 1:
            said.append("runs all of it" if self.only is None else f"runs only {', '.join(map(repr, self.only))}")
        if len(versions) > 1 and self.version is not None:
            said.append(f"says version {self.version}")
        if len(checks) > 1:
            said.append(f"runs with check={self.checks}")
        return RunDecision(by_sentence(team.gather_data(said)))


class Running:
    """The handle of a run in the background. The targets are undefined until `wait` returns.

    The constructor starts the run on a thread of its own, and returns at once. On a GPU the run has a stream of its
    own, which begins after what the caller's stream has launched so far.

    Args:
        run: does the run. Called once, on that thread, with a function that it calls when it reads no source any
            more. `wait` raises its error.
        ended: called on that thread when the run has ended or failed.
        device: of the tensors.
        is_sent: True if the run reads copies, so that `sent` is true from the beginning.
    """

    def __init__(self, run: Job, ended: Callable[[], None], device: torch.device, is_sent: bool = False) -> None:
        self._error: BaseException | None = None
        self._is_heard = False  # whether `wait` has raised the error, or returned
        self._run: Job | None = run
        self._ended = ended
        self._is_sent = threading.Event()
        if is_sent:
            self._is_sent.set()
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._sent_event: Any = None  # of the stream
        self._end_event: Any = None
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(device))
        # No daemon thread: at the end of the program the interpreter waits for it, and tears nothing down under it.
        self._thread = threading.Thread(target=self._go, name="torch_overlay Transfer")
        self._thread.start()

    def _go(self) -> None:
        """Do the run, on the thread. Keeps the error, also an interrupt, for `wait`."""
        run, self._run = self._run, None  # it refers to the tensors, which this handle shouldn't keep
        try:
            if run is not None:
                with self._stream or contextlib.nullcontext():
                    run(self._say_sent)
        except BaseException as error:
            self._error = error
        finally:
            del run
            try:
                if self._stream is not None:
                    self._end_event = self._stream.record_event()
            finally:
                self._ended()

    def _say_sent(self) -> None:
        """Note that the run has read, or has launched all reads of, the sources."""
        if self._stream is not None and not self._is_sent.is_set():
            self._sent_event = self._stream.record_event()
        self._is_sent.set()

    def sent(self) -> bool:
        """True if this rank doesn't read the sources any more, so that they may change. Also True after a run that
        failed.

        That is before the end of the run: when its last exchange is packed and large pieces are sent. If this rank has
        targets beside its sources, it copies into these last, and reads the sources until then.
        """
        if self._is_sent.is_set():
            return self._sent_event is None or bool(self._sent_event.query())
        return self.is_completed()

    def is_completed(self) -> bool:
        """True if `wait` returns, or raises, at once."""
        return not self._thread.is_alive() and (self._end_event is None or bool(self._end_event.query()))

    def wait(self) -> None:
        """Wait until the targets are written. On a GPU this returns when the run is launched: what the program's
        current stream launches next comes after it.

        Raises:
            ValueError: the run was refused, or a source was changed meanwhile, as `Transfer.run` says. Every call
                raises it.
            RuntimeError: the run failed, as `Transfer.run` says. Every call raises it.
        """
        self._thread.join()
        self._is_heard = True
        self.precede()
        if self._error is not None:
            raise self._error

    def precede(self) -> None:
        """Let the current stream wait for the run, if it is on a GPU and its thread has launched it. Else do
        nothing."""
        if self._stream is not None and self._end_event is not None:
            torch.accelerator.current_stream(self._stream.device).wait_event(self._end_event)

    def unheard(self) -> list[str]:
        """Return the error of a run for which nobody called `wait`, in words, as a list of one text; empty if there is
        none."""
        return [] if self._is_heard or self._error is None else [f"of the last run nobody waited for: {self._error}"]


def keep_for_this_stream(locals_: Iterable[torch.Tensor | None]) -> None:
    """Tell the allocator that the current stream uses these tensors, for a run in the background.

    Without it, memory that the program frees during the run would go to another tensor while the run still reads it.
    """
    for local in locals_:
        if local is not None and not local.is_cpu:
            local.record_stream(torch.accelerator.current_stream(local.device))
