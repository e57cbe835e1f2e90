"""What runs inside of a client's ranks: counts, times and results, with the same eyes on both sides.

A script asks for a `Session` before it makes a mesh, wraps its phases in it and keeps what must be equal. The session
writes one JSON and one file of tensors for each rank. It doesn't turn the overlay on: `torch_overlay run` does.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import torch_overlay
from torch_overlay.demo.counters import GroupCounter, count_collectives

FOLDER = "CLIENT_RUN_FOLDER"  # the variable that says where a run writes
REPEATS = 5


class Session:
    """One rank's notes of one run.

    Attributes:
        folder: of this run, shared by its ranks; the same data may be written there by one rank and read by all.
        rank, size: of the world, as torchrun gives them.
    """

    def __init__(self) -> None:
        self.folder = pathlib.Path(os.environ.pop(FOLDER))
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._groups = GroupCounter()
        self._phases: dict[str, dict[str, Any]] = {}
        self._losses: list[float] = []
        self._numbers: dict[str, float] = {}
        self._kept: dict[str, dict[str, torch.Tensor]] = {}
        torch.set_num_threads(1)
        torch.manual_seed(0)

    def phase(self, name: str, call: Callable[[], Any], repeats: int = 0) -> Any:
        """Call, and count the collectives of it; then call so many times more, and take this rank's processor time.

        Returns what the first call returned. Phases of one name add up their counts.
        """
        before = self._groups.calls
        result, kinds = count_collectives(call)
        found = self._phases.setdefault(name, {"kinds": {}, "new_group": 0, "calls": 0, "seconds": []})
        found["calls"] += 1
        found["new_group"] += self._groups.calls - before
        for kind, count in kinds.items():
            found["kinds"][kind] = found["kinds"].get(kind, 0) + count
        found["seconds"] += [_timed(call) for _ in range(repeats)]
        return result

    def loss(self, value: torch.Tensor) -> None:
        """Note a loss or a norm, in the order in which they come."""
        self._losses.append(value.detach().item())

    def number(self, name: str, value: float) -> None:
        """Note a number that the record shows for both sides, such as a distance from a run on one process."""
        self._numbers[name] = value

    def keep(self, name: str, tensors: dict[str, Any]) -> None:
        """Keep tensors to compare with the other side's: of a DTensor the shard of this rank, without a collective."""
        self._kept[name] = {
            key: (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
            for key, value in tensors.items()
            if isinstance(value, torch.Tensor)
        }

    def close(self) -> None:
        """Write it all, and end the world."""
        found = {
            "overlay": torch_overlay.is_enabled(),
            "new_group": self._groups.calls,
            "groups": self._groups.groups(),
            "phases": self._phases,
            "losses": self._losses,
            "numbers": self._numbers,
        }
        (self.folder / f"rank{self.rank}.json").write_text(json.dumps(found))
        torch.save(self._kept, self.folder / f"rank{self.rank}.pt")
        dist.barrier()
        dist.destroy_process_group()


def _timed(call: Callable[[], Any]) -> float:
    """Seconds of processor time of all threads of this rank, gloo's among them, which other jobs hardly move.

    Without the garbage collector, as timeit does: it walks all objects of a library, whoever made one too many.
    """
    gc.collect()
    gc.disable()
    dist.barrier()
    begun = time.process_time()
    try:
        call()
        return time.process_time() - begun
    finally:
        gc.enable()
