"""Gloo ranks that a test hands cases, one at a time, each in a world of its own.

torch's own class of continuous ranks gives up after the first failure, and waits for ever where a rank hangs. Here a
case that is wrong, raises, hangs or kills its process is one failed test: all processes are killed, and the next case
gets new ones. They are forked from a server that has imported torch, so that costs a second, not ten.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import logging
import os
import signal
import time
import traceback
import warnings
from multiprocessing.connection import Connection, wait
from typing import Any

import forks

RANKS = 8
START_SECONDS = 120
CASE_SECONDS = 45  # then a rank that hasn't answered hangs
GRACE_SECONDS = 4  # for the others, once one has failed
WORLD_TIMEOUT = datetime.timedelta(seconds=20)
MOST_SHOWN = 3


class Ranks:
    """Eight processes, started by the first case; a case for four ranks leaves the others waiting.

    Args:
        seconds: how long a case may take.
    """

    def __init__(self, seconds: float = CASE_SECONDS) -> None:
        self._seconds = seconds
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._worlds = 0

    def ask(self, case: Any, size: int, options: dict[str, object]) -> str:
        """Run `case(rank, size)` on `size` ranks under these options; what went wrong on which rank, or nothing."""
        if not self._processes:
            self._start()
        self._worlds += 1
        pipes = self._pipes[:size]
        for pipe in pipes:
            pipe.send((case, size, options, self._worlds))
        answers = self._answers(size)
        silent = [rank for rank in range(size) if rank not in answers]
        if not silent and not any(answers.values()):
            return ""
        for rank in silent:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
            answers[rank] = "didn't answer; the calls of its threads are on standard error"
        time.sleep(0.5 if silent else 0)
        self.stop(kill=True)
        found = [f"rank {rank} of {size}: {text}" for rank, text in answers.items() if text]
        more = [f"and {len(found) - MOST_SHOWN} more ranks"] if len(found) > MOST_SHOWN else []
        return "\n".join([*found[:MOST_SHOWN], *more])

    def stop(self, kill: bool = False) -> None:
        """End the processes; with `kill`, those too that hang."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.kill() if kill else process.join(5)
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _answers(self, size: int) -> dict[int, str]:
        """What each rank said in time; of one that died, how. Who died comes first, then who was first."""
        answers: dict[int, str] = {}
        deadline = time.monotonic() + self._seconds
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:size])}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    self._processes[rank].join(1)
                    answers = {rank: f"its process ended, exit code {self._processes[rank].exitcode}", **answers}
                if answers[rank]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def _start(self) -> None:
        context = forks.context()
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        port = self._ready(self._pipes[:1])[0]
        for pipe in self._pipes[1:]:
            pipe.send(port)
        self._ready(self._pipes[1:])

    def _ready(self, pipes: list[Connection]) -> list[int]:
        """The port of the store, as each of these ranks knows it."""
        ports = []
        for pipe in pipes:
            assert pipe.poll(START_SECONDS), "a rank didn't come up"
            ports.append(pipe.recv())
        return ports


def _serve(rank: int, pipe: Connection) -> None:
    """One rank: case after case, until it is told to end."""
    import torch
    import torch.distributed as dist

    gc.freeze()  # as in mesh_ranks.py
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    patience = datetime.timedelta(seconds=START_SECONDS)
    port = 0 if rank == 0 else pipe.recv()
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, patience, wait_for_workers=False)
    pipe.send(store.port)
    while (order := pipe.recv()) is not None:
        pipe.send(_answer(rank, store, *order))
    os._exit(0)  # without waiting for threads of torch's


def _answer(rank: int, store: Any, case: Any, size: int, options: dict[str, object], world: int) -> str:
    """What went wrong on this rank. The world opens and closes under the overlay, as a user's does."""
    import torch.distributed as dist

    from way import overlay

    try:
        with overlay(**options):
            store = dist.PrefixStore(str(world), store)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=WORLD_TIMEOUT)
            case(rank, size)
            dist.barrier()  # nobody closes a connection that another rank still makes
            dist.destroy_process_group()
    except BaseException:  # whatever it is, the parent says so and starts anew
        return traceback.format_exc()
    return ""
