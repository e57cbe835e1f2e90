"""A run in the background: the exchanges of a transfer on a thread, while the program goes on."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from .runs import Locals

    Job = Callable[[Callable[[], None]], None]  # calls what it is given when no source is read any more


class Running:
    """A run that goes on. The targets are undefined until `wait`.

    On a GPU it has a stream of its own, which begins after what the program has launched, and `wait` lets the
    program's stream go on after it.

    Args:
        ended: called by the thread in the end.
        device: where the tensors are.
        is_sent: whether the run reads copies, so that the sources may change from the beginning.
    """

    def __init__(self, run: Job, ended: Callable[[], None], device: torch.device, is_sent: bool = False) -> None:
        self._error: BaseException | None = None
        self._is_heard = False
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
        # No daemon: at the end of the program the interpreter waits for it, and tears nothing down under it.
        self._thread = threading.Thread(target=self._go, name="torch_overlay Transfer")
        self._thread.start()

    def _go(self) -> None:
        run, self._run = self._run, None  # which has the tensors
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
        if self._stream is not None and not self._is_sent.is_set():
            self._sent_event = self._stream.record_event()
        self._is_sent.set()

    def sent(self) -> bool:
        """Whether the sources may be changed: they aren't read any more on this rank. That is before the end, when its
        last exchange is packed and what goes from tensor to tensor is sent, unless the rank has targets beside them,
        into which it copies last."""
        if self._is_sent.is_set():
            return self._sent_event is None or bool(self._sent_event.query())
        return self.is_completed()

    def is_completed(self) -> bool:
        """Whether `wait` returns at once."""
        return not self._thread.is_alive() and (self._end_event is None or bool(self._end_event.query()))

    def wait(self) -> None:
        """Until the targets are whole; on a GPU, until they are for what the program launches next. Raises as
        `Transfer.run`, each time that it is called."""
        self._thread.join()
        self._is_heard = True
        self.precede()
        if self._error is not None:
            raise self._error

    def precede(self) -> None:
        """On a GPU, what the program launches next runs after this one, which its thread has launched."""
        if self._stream is not None and self._end_event is not None:
            torch.accelerator.current_stream(self._stream.device).wait_event(self._end_event)

    def unheard(self) -> list[str]:
        """The error of a run that has ended, in words, if nobody waited for it."""
        return [] if self._is_heard or self._error is None else [f"of the last run nobody waited for: {self._error}"]


def keep_for_this_stream(locals_: Iterable[torch.Tensor | None]) -> None:
    """The allocator gives the memory of these to nobody while this stream may read or write it, even if the program
    lets go of them."""
    for local in locals_:
        if local is not None and not local.is_cpu:
            local.record_stream(torch.accelerator.current_stream(local.device))


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None of one that doesn't count."""
    return None if tensor.is_inference() else tensor._version


def size_of(locals_: Locals, numbers: Collection[int]) -> int:
    """Bytes of the tensors that have these numbers; one that has several counts once."""
    each = {id(local): local.nbytes for number in numbers if (local := locals_[number]) is not None}
    return sum(each.values())


def copies(
    locals_: Locals, room: int, numbers: Collection[int], why: str
) -> tuple[list[torch.Tensor | None], list[str]]:
    """The same list, with copies of the tensors that have these numbers; and, if they don't fit into `room` bytes, that
    they don't, in words.

    Args:
        why: what takes the room, for these words.
    """
    each = {id(local): local for number in numbers if (local := locals_[number]) is not None}
    size = size_of(locals_, numbers)
    if size > room:
        return [*locals_], [f"{why} takes {size} bytes, and {room} of the budget are left: give a larger budget="]
    with torch.no_grad():
        copied = {key: local.detach().clone() for key, local in each.items()}
    return [copied.get(id(local), local) if n in numbers else local for n, local in enumerate(locals_)], []
