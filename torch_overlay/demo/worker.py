"""One rank of one run: a process that does what the parent asks for, one order at a time."""

from __future__ import annotations

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
        self.state: dict[str, torch.Tensor] = {}

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

    def gather(self) -> dict[str, Any]:
        """Make the weights whole on every rank; answers with how many there are and what that took."""
        self.state, collectives = count_collectives(self.trainer.full_state)
        return {
            "parameters": len(self.state),
            "elements": sum(value.numel() for value in self.state.values()),
            "state_collectives": sum(collectives.values()),
        }

    def gather_again(self) -> float:
        """The seconds of the same without a profiler."""
        dist.barrier()
        start = time.perf_counter()
        self.trainer.full_state()
        return time.perf_counter() - start

    def keep_weights(self, path: str) -> None:
        """Write the weights that `gather` made, for another run to compare."""
        torch.save(self.state, path)

    def compare_weights(self, path: str) -> dict[str, Any]:
        """How far the weights are from those in a file: a `Difference` as plain data."""
        return weights_apart(torch.load(path), self.state)

    def finish(self) -> dict[str, Any]:
        """Leave the world; says what the run has come to on this rank."""
        facts = {
            "groups": self.counter.groups(),
            "new_group_calls": self.counter.calls,
            "threads_and_sockets": threads_and_sockets(),
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


def weights_apart(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A `Difference` as plain data.

    >>> apart = weights_apart({"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([1.0, -2.5])})
    >>> apart["elements"], apart["different"], apart["largest"], apart["name"], apart["scale"]
    (2, 1, 0.5, 'w', 2.0)
    """
    found: dict[str, Any] = {"elements": 0, "different": 0, "largest": 0.0, "name": "", "scale": 0.0}
    for name, one in theirs.items():
        apart = (one - ours[name]).abs()
        found["elements"] += one.numel()
        found["different"] += int((one != ours[name]).sum())
        if apart.max().item() > found["largest"]:
            found |= {"largest": apart.max().item(), "name": name, "scale": one.abs().max().item()}
    return found
