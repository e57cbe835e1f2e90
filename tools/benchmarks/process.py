"""Fresh processes: one that measures one side by itself, or the ranks of a gloo world that measure together."""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import subprocess
import sys
import time
import traceback
from typing import Any

TOOLS = pathlib.Path(__file__).resolve().parents[1]
_QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_PRELOAD = ["torch.distributed.tensor", "torch._dynamo"]  # imported once, then forked; dynamo since DTensor needs it
_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


class ChildFailed(RuntimeError):
    """A process that measured ended with an error, or didn't answer in time; the message has its last words."""


def fresh(function: str, timeout: float = 1800, **arguments: Any) -> Any:
    """Call ``module:function`` of this package in a new Python; arguments and answer are plain data."""
    paths = [str(TOOLS), str(TOOLS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **_QUIET, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    command = [sys.executable, "-m", __name__, function, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise ChildFailed(f"{function}({arguments}) ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _call(function: str, *positional: Any, **arguments: Any) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)(*positional, **arguments)


def ranks(function: str, size: int, timeout: float = 1800, **arguments: Any) -> Any:
    """Call ``module:function(rank, size, port, **arguments)`` on so many processes at once; returns rank 0's answer.

    ``port`` is that of a TCPStore server, which rank 0 must not start: it runs here. No process outlives the call.
    """
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    context: Any = multiprocessing.get_context(_METHOD)
    if _METHOD == "forkserver":
        context.set_forkserver_preload(_PRELOAD)
    os.environ.update(_QUIET)
    processes, pipes = [], []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve, args=(theirs, function, rank, size, store.port, arguments), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return _answers(pipes, time.monotonic() + timeout)[0]
    finally:
        for process in processes:
            process.join(10 if sys.exc_info()[0] is None else 0)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(pipe: Any, function: str, rank: int, size: int, port: int, arguments: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # what stock says on every rank of gloo: it gathers where it is asked to exchange
    try:
        pipe.send((True, _call(function, rank, size, port, **arguments)))
    except Exception:
        pipe.send((False, traceback.format_exc()))


def _answers(pipes: list[Any], deadline: float) -> list[Any]:
    """Every rank's answer, by rank. The first that fails fails all: the others wait for it in vain."""
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise ChildFailed(f"ranks {sorted(waiting.values())} gave no answer in time")
        for pipe in ready:
            rank = waiting[pipe]  # type: ignore[index]
            try:
                right, answer = pipe.recv()
            except EOFError:
                raise ChildFailed(f"rank {rank} ended without an answer") from None
            if not right:
                raise ChildFailed(f"rank {rank} failed:\n{answer}")
            answers[rank] = answer
    return [answers[rank] for rank in range(len(pipes))]


if __name__ == "__main__":
    print(json.dumps(_call(sys.argv[1], **json.loads(sys.argv[2]))))
