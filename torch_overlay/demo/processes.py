"""Starts the ranks of the demo as processes, sends them orders and collects their answers."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# A server imports torch (and dynamo, for DTensor) once and forks the ranks. Without fork each rank imports torch.
_RANKS = "torch_overlay.demo.ranks"
_NUMPY = "ignore:Failed to initialize NumPy:UserWarning"
_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


class WorkerError(RuntimeError):
    """A rank failed, ended or gave no answer in time. The message names it, with the last lines that it printed."""


class Processes:
    """The ranks of one world. Use it as a context manager, or close it: then all processes end.

    Args:
        name: how messages call this world.
        class_name: the name of the ranks' class in `ranks.py`, which imports torch.
        ranks: how many there are.
        timeout: how many seconds a rank may take for an answer.
        arguments: of the class, beside the rank.
    """

    def __init__(self, name: str, class_name: str, ranks: int, timeout: float = 120.0, **arguments: Any) -> None:
        self.name, self.ranks, self.timeout = name, ranks, timeout
        self._class_name, self._arguments = class_name, {"ranks": ranks, **arguments}
        self._logs = tempfile.TemporaryDirectory(prefix="torch_overlay_demo_")
        self.processes: list[Any] = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        with _worker_environment():  # which processes get when they start
            for rank in range(ranks):
                self._start(rank)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(force=exception[0] is not None)

    def ask(self, order: str, *arguments: Any, ranks: range | None = None) -> list[Any]:
        """Send an order to all ranks (or some), and return their answers in the order of the ranks."""
        ranks = ranks or range(self.ranks)
        self.tell(order, *arguments, ranks=ranks)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        while len(answers) < len(ranks):
            waiting = {self._pipes[rank]: rank for rank in ranks if rank not in answers}
            # All at once, so that a rank that dies is noticed while another one is still at work.
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                who = self._who(sorted(waiting.values()))
                raise WorkerError(f"{who}: no answer to {order!r} in {self.timeout:g} s")
            self._collect({waiting[pipe] for pipe in ready}, order, answers)  # type: ignore[index]
        return [answers[rank] for rank in ranks]

    def tell(self, order: str, *arguments: Any, ranks: range) -> None:
        """Send an order without waiting for the answer. A rank that is gone is passed over."""
        for rank in ranks:
            try:
                self._pipes[rank].send((order, arguments))
            except (BrokenPipeError, ConnectionResetError):
                pass  # the rank is gone, which `ask` finds when it waits for the answer

    def enter(self) -> str:
        """Let all ranks open their world. Returns torch's version."""
        (release, *_) = self.ask("ready")
        (port,) = self.ask("listen", ranks=range(1))
        self.ask("join", port)
        return release

    def answered(self, rank: int, seconds: float = 0.0) -> bool:
        """True if a rank has answered an order of `tell`, or has ended."""
        return self._pipes[rank].poll(seconds)

    def log(self, rank: int) -> str:
        """The text that a rank has printed so far; empty if there is none."""
        try:
            with open(self._log(rank), encoding="utf-8", errors="replace") as log:
                return log.read()
        except OSError:
            return ""

    def close(self, force: bool = False) -> None:
        """Ask all processes to end, and kill those that don't within 5 seconds; at once if `force`. What they printed
        is deleted."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                pass
        # A rank that waits in a collective never reads the order to end.
        for process in self.processes:
            process.join(0 if force else 5)
            if process.is_alive():
                process.kill()
            process.join()
        self._logs.cleanup()

    def _start(self, rank: int) -> None:
        """Start the process of a rank, with a pipe for orders and answers, and add both to the lists."""
        context: Any = multiprocessing.get_context(_METHOD)
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_run_rank, args=(self._class_name, rank, self._arguments, theirs, self._log(rank)), daemon=True
        )
        process.start()
        theirs.close()  # else this process would hold the pipe open, and never notice that the rank ended
        self.processes.append(process)
        self._pipes.append(ours)

    def _collect(self, ranks: set[int], order: str, answers: dict[int, Any]) -> None:
        """Read the answers of ranks that have one, into `answers`."""
        for rank in sorted(ranks):
            try:
                succeeded, answer = self._pipes[rank].recv()
            except (EOFError, ConnectionResetError):
                self.processes[rank].join(5)
                code = self.processes[rank].exitcode
                ended = f"{self._who([rank])} ended (exit code {code}) during {order!r}"
                raise WorkerError(f"{ended}\n{self._last_words(rank)}") from None
            if not succeeded:
                raise WorkerError(f"{self._who([rank])} failed during {order!r}\n{answer}")
            answers[rank] = answer

    def _who(self, ranks: list[int]) -> str:
        """The world and some of its ranks as text."""
        return f"{self.name}: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

    def _log(self, rank: int) -> str:
        """The path of the file to which a rank prints."""
        return os.path.join(self._logs.name, f"rank{rank}.log")

    def _last_words(self, rank: int) -> str:
        """The last lines that a rank printed."""
        return "\n".join(self.log(rank).splitlines()[-20:])


def _run_rank(class_name: str, *arguments: Any) -> None:
    """The main function of a rank's process: imports torch, then answers orders until the parent ends it."""
    ranks = importlib.import_module(_RANKS)  # imports torch, which the parent never does
    ranks.serve(getattr(ranks, class_name), *arguments)


@contextmanager
def _worker_environment() -> Iterator[None]:
    """Set the environment in which the ranks start, in this process: one thread each, loopback only. What was there is
    restored after the block."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    # One thread each: up to twelve ranks share the cores. Loopback: gloo else resolves the host's name, which may fail.
    wanted = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, "TP_SOCKET_IFNAME": loopback}
    # Torch warns once where numpy isn't installed, and the demo needs none.
    wanted["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), _NUMPY]))
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        if _METHOD == "forkserver":
            multiprocessing.get_context(_METHOD).set_forkserver_preload([_RANKS, "torch._dynamo"])
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
