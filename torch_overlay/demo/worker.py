"""One rank of one run: a process that does what the parent asks for, one order at a time."""

from __future__ import annotations

import hashlib
import os
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import torch_overlay
from torch_overlay.demo.config import Config
from torch_overlay.demo.counters import GroupCounter, count_collectives, threads_and_sockets
from torch_overlay.demo.meshes import build_meshes
from torch_overlay.demo.training import Trainer

LOOPBACK = "127.0.0.1"


class Worker:
    """The orders that a rank understands. Each is given to all ranks of a run, so that collectives meet."""

    def __init__(self, config: Config, rank: int, overlay: bool) -> None:
        self.config = config
        self.rank = rank
        torch.set_num_threads(1)
        if overlay:
            torch_overlay.enable()
        elif torch_overlay.is_enabled():
            raise RuntimeError("the stock run needs stock torch, but the overlay is on: start the demo without `run`")
        self.store: dist.TCPStore | None = None
        self.trainer: Trainer

    def ready(self) -> tuple[str, int]:
        """Answers once torch is imported and the overlay is on or off: (torch's version, patches in place)."""
        status = torch_overlay.status()
        return status.release, sum(row.state == "on" for row in status.rows)

    def listen(self) -> int:
        """Rank 0 holds the store; the system picks the port, so two runs never meet."""
        self.store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return self.store.port

    def join(self, port: int) -> None:
        """Enter the world."""
        store = self.store or dist.TCPStore(LOOPBACK, port, is_master=False, timeout=self._timeout)
        size = self.config.ranks
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=size, timeout=self._timeout)
        self.counter = GroupCounter()
        dist.barrier()

    def build(self) -> dict[str, float]:
        """Make the meshes, the part that the overlay changes most, and say what it took."""
        start = time.perf_counter()
        self.meshes = build_meshes(self.config)
        seconds = time.perf_counter() - start
        dist.barrier()
        return {"build_seconds": seconds}

    def prepare(self) -> str:
        """Build and shard the model; answers with a digest of the text, for the parent to compare."""
        self.trainer = Trainer(self.config, self.meshes)
        return self.trainer.text.digest

    def train(self, first: int, count: int) -> list[tuple[float, float]]:
        """(loss, seconds) of each of `count` steps."""
        answers = []
        for step in range(first, first + count):
            start = time.perf_counter()
            loss = self.trainer.step(step)
            answers.append((loss, time.perf_counter() - start))
        return answers

    def count(self, step: int) -> tuple[float, dict[str, int]]:
        """Train one step with all collectives counted: (loss, how many of each kind)."""
        return count_collectives(lambda: self.trainer.step(step))

    def finish(self) -> dict[str, Any]:
        """Gather the weights and leave the world; says what the run has come to on this rank."""
        state, collectives = count_collectives(self.trainer.full_state)
        facts = {
            "groups": self.counter.groups(),
            "new_group_calls": self.counter.calls,
            "threads_and_sockets": threads_and_sockets(),
            "parameters": len(state),
            "elements": sum(value.numel() for value in state.values()),
            "state_collectives": sum(collectives.values()),
            "weights_digest": _digest(state),
        }
        dist.barrier()
        dist.destroy_process_group()
        return facts

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.config.timeout)


def serve(config: Config, rank: int, overlay: bool, parent: Connection, log: str) -> None:
    """A worker's main: answer the parent's orders until it sends None or is gone.

    An answer is (True, value) or (False, traceback). What torch prints goes to the file `log`, which the parent shows
    if the worker fails.
    """
    _redirect_output(log)
    try:
        worker = Worker(config, rank, overlay)
        while (order := parent.recv()) is not None:
            name, arguments = order
            parent.send((True, getattr(worker, name)(*arguments)))
    except EOFError:
        pass  # the parent is gone
    except Exception:
        parent.send((False, _shorten(traceback.format_exc())))


def _shorten(report: str, head: int = 15, tail: int = 25) -> str:
    """The ends of a long report: what was called and what went wrong; a recursion's middle is thousands of lines."""
    lines = report.splitlines()
    if len(lines) > head + tail:
        lines[head:-tail] = [f"  ... {len(lines) - head - tail} lines ..."]
    return "\n".join(lines)


def _redirect_output(log: str) -> None:
    """Send this process' stdout and stderr to a file, C++ libraries' included."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _digest(state: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].contiguous().numpy().tobytes())
    return digest.hexdigest()
