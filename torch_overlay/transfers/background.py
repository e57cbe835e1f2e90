"""The handle of a `Transfer`'s run in the background, and the thread and stream on which that run goes."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Job = Callable[[Callable[[], None]], object]  # calls what it is given when no source is read any more


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
        targets beside its sources, it copies into these last, and reads the sources until then. At an open place it is
        the end, unless the run has a snapshot: without a server that dies it is done again.
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
        if local is not None and not (local.is_cpu or local.is_meta):
            local.record_stream(torch.accelerator.current_stream(local.device))
