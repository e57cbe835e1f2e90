"""Fresh processes: one that measures one side by itself, or the ranks of a world that measure together."""

from __future__ import annotations

import importlib
import json
import logging
import os
import pathlib
import subprocess
import sys
from typing import Any

TOOLS = pathlib.Path(__file__).resolve().parents[1]
_QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
PRELOADED = ["torch.distributed.tensor", "torch._dynamo"]  # imported once, then forked; dynamo since DTensor needs it


class ChildFailed(RuntimeError):
    """A process that measured ended with an error; the message has what it printed last."""


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
    """Call ``module:function(rank, **arguments)`` in a gloo world of so many processes; returns rank 0's answer."""
    from torch.distributed import TCPStore

    from torch_overlay.testing.pool import Pool  # not above: `fresh` measures imports of the package, too

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with Pool(size, _Rank, timeout=timeout, preload=PRELOADED, environment=_QUIET) as pool:
        return pool.ask("call", function, size, store.port, arguments)[0]


class _Rank:
    def __init__(self, rank: int) -> None:
        import torch

        self.rank = rank
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)  # what stock says on each rank of gloo: it gathers where it should exchange

    def call(self, function: str, size: int, port: int, arguments: dict[str, Any]) -> Any:
        import torch.distributed as dist

        store = dist.TCPStore("localhost", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=size)
        answer = _call(function, self.rank, **arguments)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        return answer


if __name__ == "__main__":
    print(json.dumps(_call(sys.argv[1], **json.loads(sys.argv[2]))))
