"""`Pool`, processes that each hold an object and call its methods when told: for tests, the demo, searches, benchmarks.

    class Rank:
        def __init__(self, rank, port): ...
        def add(self, number): ...

    with Pool(4, Rank, port, timeout=60) as ranks:
        totals = ranks.ask("add", 5)  # of all ranks, in their order

It imports no torch; its processes do, once for all of them where they are forked.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

# A server imports torch (and dynamo, for DTensor) once and forks the ranks. Without fork each rank imports torch.
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
GRACE = 4.0  # seconds for the others to answer, once a rank failed: they often fail of what it did
MOST_SHOWN, LINES = 3, 40  # failed ranks in an error, and of each the last lines that it printed
_SomePool = TypeVar("_SomePool", bound="Pool")
_STACKS: Any = getattr(signal, "SIGUSR1", None)  # a rank prints where its threads are; None on Windows


class RankError(RuntimeError):
    """A rank raised, ended, or gave no answer in time: which one, with its traceback or what it printed last."""


def context(preload: Iterable[str] = (), method: str = METHOD) -> Any:
    """Return the multiprocessing context of a start method. A server of forks that isn't running yet will import these
    modules; a process has one such server."""
    found = multiprocessing.get_context(method)
    if method == "forkserver":
        found.set_forkserver_preload([*preload])
    return found


class Pool:
    """Processes, one for each rank. Use it as a context manager, or close it: then all of them end.

    Args:
        size: how many there are.
        make: called in each process as ``make(rank, *arguments)``; orders go to the object that it returns. It is
            pickled by its name.
        name: how errors call this pool.
        timeout: how many seconds ranks may take for an answer.
        preload: modules to import once, before ranks are forked.
        method: how multiprocessing starts them. "fork" gives them what this process has imported.
        environment: variables of the ranks. Gloo talks by the loopback device, since it else resolves the host's name,
            which may fail.
    """

    def __init__(
        self,
        size: int,
        make: Callable[..., Any],
        *arguments: Any,
        name: str = "",
        timeout: float = 120.0,
        preload: Iterable[str] = (),
        method: str = METHOD,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.size, self.name, self.timeout = size, name, timeout
        self.processes: list[Any] = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._logs = tempfile.TemporaryDirectory(prefix="torch_overlay_pool_")
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        variables = {"GLOO_SOCKET_IFNAME": loopback, "TP_SOCKET_IFNAME": loopback, **(environment or {})}
        start = context(preload, method)
        with _environment(variables):  # a server of forks has the variables of the time at which it starts
            for rank in range(size):
                ours, theirs = start.Pipe()
                how = (make, rank, arguments, theirs, self._log(rank), variables)
                process = start.Process(target=_serve, args=how, daemon=True)
                process.start()
                theirs.close()  # else this process would hold the pipe open, and never notice that the rank ended
                self.processes.append(process)
                self._pipes.append(ours)

    def __enter__(self: _SomePool) -> _SomePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(force=exception[0] is not None)

    def ask(self, order: str, *arguments: Any, ranks: Iterable[int] | None = None) -> list[Any]:
        """Send an order to all ranks (or some), and return their answers in the order of the ranks.

        Raises:
            RankError: of a rank that failed, with those that failed after it; one that died comes first. All processes
                are killed then.
        """
        asked = [*(range(self.size) if ranks is None else ranks)]
        self.tell(order, *arguments, ranks=asked)
        answers = self.answers(order, ranks=asked)
        errors = [answer for answer in answers.values() if isinstance(answer, RankError)]
        if errors:
            self.close(force=True)
            more = [f"and {len(errors) - MOST_SHOWN} more ranks"] if len(errors) > MOST_SHOWN else []
            raise RankError("\n".join([*map(str, errors[:MOST_SHOWN]), *more]))
        return [answers[rank] for rank in asked]

    def tell(self, order: str, *arguments: Any, ranks: Iterable[int] | None = None) -> None:
        """Send an order without waiting for answers. A rank that is gone is passed over."""
        for rank in range(self.size) if ranks is None else ranks:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `answers` finds that it is gone
                self._pipes[rank].send((order, arguments))

    def answers(
        self, order: str, ranks: Iterable[int] | None = None, timeout: float | None = None, grace: float | None = None
    ) -> dict[int, Any]:
        """Wait for the answers to an order of `tell`.

        Returns:
            By rank, as they came: the answer, or a RankError if it raised, ended or gave none within the timeout, or
            within `grace` seconds (`GRACE`) after another failed. Those that ended come first.
        """
        answers: dict[int, Any] = {}
        start = time.monotonic()
        deadline = start + (self.timeout if timeout is None else timeout)
        waiting: dict[Any, int] = {self._pipes[rank]: rank for rank in (range(self.size) if ranks is None else ranks)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            # All at once, so that a rank that dies is noticed while another one is still at work.
            for pipe in multiprocessing.connection.wait([*waiting], left):
                rank = waiting.pop(pipe)
                try:
                    succeeded, answer = self._pipes[rank].recv()
                except (EOFError, OSError):
                    self.processes[rank].join(5)
                    ended = f"ended (exit code {self.processes[rank].exitcode}) during {order!r}"
                    answers = {rank: self._error(rank, f"{ended}\n{self._printed_last(rank)}"), **answers}
                    succeeded = False
                else:
                    answers[rank] = answer if succeeded else self._error(rank, f"failed during {order!r}\n{answer}")
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + (GRACE if grace is None else grace))
        silent = f"no answer to {order!r} in {time.monotonic() - start:.0f} s"
        for rank in waiting.values() if _STACKS else ():
            os.kill(self.processes[rank].pid, _STACKS)
        time.sleep(0.5 if waiting else 0)
        for rank in waiting.values():
            answers[rank] = self._error(rank, f"{silent}\n{self._printed_last(rank)}")
        return answers

    def answered(self, rank: int, seconds: float = 0.0) -> bool:
        """Return True if a rank has answered an order of `tell`, or has ended."""
        return self._pipes[rank].poll(seconds)

    def log(self, rank: int) -> str:
        """Return the text that a rank has printed so far, C++ libraries too; empty if there is none."""
        try:
            with open(self._log(rank), encoding="utf-8", errors="replace") as log:
                return log.read()
        except OSError:
            return ""

    def close(self, force: bool = False) -> None:
        """Ask all processes to end, and kill those that don't within 5 seconds; at once if `force`. What they printed
        is deleted."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        # A rank that waits in a collective never reads the order to end.
        for process in self.processes:
            process.join(0 if force else 5)
            process.kill()
        for process in self.processes:
            process.join()
        self._logs.cleanup()

    def _error(self, rank: int, what: str) -> RankError:
        return RankError(f"{self.name and self.name + ': '}rank {rank} {what}".rstrip())

    def _printed_last(self, rank: int) -> str:
        return "\n".join(self.log(rank).splitlines()[-LINES:])

    def _log(self, rank: int) -> str:
        return os.path.join(self._logs.name, f"rank{rank}.log")


def _serve(
    make: Callable[..., Any],
    rank: int,
    arguments: tuple[Any, ...],
    pipe: multiprocessing.connection.Connection,
    log: str,
    variables: Mapping[str, str],
) -> None:
    """The main function of a rank: answers orders until the parent sends None or ends, or an order fails."""
    gc.freeze()  # what the server has: each full collection would go through it, and copy the pages of the fork
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):  # not sys.stdout, since C++ libraries print, too
        os.dup2(file, stream)
    os.environ.update(variables)  # a server of forks that was running already has others
    if _STACKS:
        faulthandler.register(_STACKS, file=file, all_threads=True)
    try:
        worker = make(rank, *arguments)
        while (order := _received(pipe)) is not None:
            name, order_arguments = order
            pipe.send((True, getattr(worker, name)(*order_arguments)))
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send((False, traceback.format_exc(limit=-20)))  # a recursion has thousands of frames
    os._exit(0)  # without waiting for threads of torch's


def _received(pipe: multiprocessing.connection.Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None  # the parent has ended


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
