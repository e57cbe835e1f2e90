"""Calls that block outside of Python, on threads of their own, so that Ctrl-C, a limit or a closed connection ends the
wait for them. Start at `in_time` and `interruptibly`."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK = 0.5  # seconds between two looks whether a wait is given up


def ask_aside(ask: Callable[[], Any]) -> Future[Any]:
    """Call `ask`, which asks a store something, on a thread of its own. Returns its future result.

    A store waits without a limit for the answer of a process that died while its connections stay open: as they do
    while a child that it forked lives, or when its host lost power. The thread is a daemon, and is left behind then.
    """
    answer: Future[Any] = Future()

    def work() -> None:
        """Run on the thread: set the result of `ask`, or its error."""
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="torch_overlay asks a store", daemon=True).start()
    return answer


def in_time(ask: Callable[[], Any], seconds: float) -> Any:
    """Call `ask` on a thread of its own, and wait for its result for at most `seconds`."""
    return ask_aside(ask).result(seconds)


class _Waiter:
    """A thread that waits in place of another one, for instance the main thread."""

    def __init__(self) -> None:
        self._idle: SimpleQueue[_Call | None] | None = None  # of the thread that has nothing to do, if there is one

    def call(self, wait: Callable[[], Any], gives_up: Callable[[], bool]) -> Any:
        """Call `wait` on the thread, and return what it returns, or raise what it raises. If a signal's handler raises
        meanwhile, that is raised at once, and GivenUp once `gives_up` is true; the call then goes on until it ends by
        itself."""
        thread, self._idle = self._idle, None
        if thread is None:
            thread = SimpleQueue()
            threading.Thread(target=_serve, args=(thread,), name="torch_overlay waits", daemon=True).start()
        call = _Call(wait)
        thread.put(call)
        try:
            while not call.ended.acquire(timeout=LOOK):
                if gives_up():
                    raise GivenUp("it doesn't end, and the connections were closed")
        except BaseException:
            thread.put(None)
            raise
        self.end()  # of a thread that a signal's handler used meanwhile
        self._idle = thread
        if call.error is not None:
            raise call.error
        return call.result

    def end(self) -> None:
        """End the idle thread, if there is one."""
        thread, self._idle = self._idle, None
        if thread is not None:
            thread.put(None)

    __del__ = end


class _Call:
    """A call of the main thread, which is done on another one. `ended` is released when it has ended."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self.wait: Callable[[], Any] | None = wait
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = threading.Lock()
        self.ended.acquire()


def _serve(calls: SimpleQueue[_Call | None]) -> None:
    """Do one call after the other, until None comes. Runs on the waiter's thread, and holds nothing between calls."""
    while (call := calls.get()) is not None:
        try:
            if call.wait is not None:
                call.result = call.wait()
        except BaseException as error:
            call.error = error
        finally:
            call.wait = None
            call.ended.release()
            del call


class GivenUp(RuntimeError):
    """A wait didn't end though the connections that it waits for were closed. What it waits for is never freed."""


_waiter = _Waiter()
_of_thread = threading.local()  # the waiter of another thread; ends with it
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_waiter.__init__)  # type: ignore[misc]


def interruptibly(wait: Callable[[], Any], gives_up: Callable[[], bool] | None = None) -> Any:
    """Call `wait`, which blocks outside of Python, for instance in gloo, in such a way that Ctrl-C ends it, and that it
    is given up. Returns what it returns; raises what it raises, or what a signal's handler raises.

    Python runs handlers in the main thread alone, between two of its instructions: in gloo, Ctrl-C did nothing until
    the other rank came. So there another thread calls `wait`, while the main thread waits for a lock, which signals
    wake. `wait` may use nothing that belongs to a thread, as streams and modes do.
    """
    if threading.current_thread() is threading.main_thread():
        return _waiter.call(wait, gives_up or _never)
    if gives_up is None:
        return wait()
    waiter = getattr(_of_thread, "waiter", None)
    if waiter is None:
        waiter = _of_thread.waiter = _Waiter()
    return waiter.call(wait, gives_up)


def _never() -> bool:
    return False


def end() -> None:
    """End the idle thread of the main thread. Called at the end of the process."""
    _waiter.end()
