"""One rank of a world: a process that does what the parent asks for, one order at a time."""

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

LOOPBACK = "127.0.0.1"


class Rank:
    """The orders that every rank understands: enter a world and leave it. Each is given to all ranks.

    Args:
        overlay: whether the overlay is on, and with which options.
        device: where the tensors are, "cpu" or "cuda"; new ones are made there by default.
    """

    def __init__(
        self, rank: int, ranks: int, overlay: bool, timeout: float = 120.0, device: str = "cpu", **options: Any
    ) -> None:
        self.rank, self.ranks, self.timeout, self.device = rank, ranks, timedelta(seconds=timeout), device
        torch.set_num_threads(1)
        self.backend = "gloo" if device == "cpu" else self._use_gpus()
        if overlay:
            torch_overlay.enable(**options)
        elif torch_overlay.is_enabled():
            raise RuntimeError("the stock run needs stock torch, but the overlay is on: start the demo without `run`")
        self.store: dist.TCPStore | None = None

    def _use_gpus(self) -> str:
        """Take a GPU in turn, for all tensors to come; the backend that ranks can have then: NCCL wants a GPU each."""
        count = torch.cuda.device_count()
        if not count:
            raise RuntimeError("--device cuda needs a GPU, and torch finds none")
        torch.cuda.set_device(self.rank % count)
        torch.set_default_device(f"cuda:{self.rank % count}")
        return "nccl" if count >= self.ranks else "gloo"

    def ready(self) -> str:
        """Answers once torch is imported and the overlay is on or off: torch's version."""
        return torch_overlay.status().release

    def listen(self) -> int:
        """Rank 0 holds the store; the system picks the port, so two worlds never meet."""
        self.store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=self.timeout)
        return self.store.port

    def join(self, port: int) -> None:
        """Enter the world."""
        store = self.store or dist.TCPStore(LOOPBACK, port, is_master=False, timeout=self.timeout)
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.ranks, timeout=self.timeout)
        dist.barrier()

    def leave(self) -> None:
        dist.barrier()
        dist.destroy_process_group()


def timed(call: Any) -> float:
    """The seconds of a call, which all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    call()
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def serve(make: type[Rank], rank: int, arguments: dict[str, Any], parent: Connection, log: str) -> None:
    """A rank's main: answer the parent's orders until it sends None or is gone.

    An answer is (True, value) or (False, traceback). What torch prints goes to the file `log`, which the parent reads.
    """
    _redirect_output(log)
    try:
        worker = make(rank, **arguments)
        while (order := parent.recv()) is not None:
            name, given = order
            parent.send((True, getattr(worker, name)(*given)))
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
