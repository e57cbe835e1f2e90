"""Starts the worlds of the demo: pools of processes that import torch, which the parent never does."""

from __future__ import annotations

import importlib
import os
from typing import Any

from ..testing.pool import Pool

_RANKS = "torch_overlay.demo.ranks"
_NUMPY = "ignore:Failed to initialize NumPy:UserWarning"


class World(Pool):
    """The ranks of one world.

    Args:
        name: how messages call it.
        class_name: the name of the ranks' class in `ranks.py`, which imports torch.
        size: how many there are.
        timeout: how many seconds a rank may take for an answer.
        options: of the class, beside the rank and the size.
    """

    def __init__(self, name: str, class_name: str, size: int, timeout: float = 120.0, **options: Any) -> None:
        # One thread each: up to twelve ranks share the cores. Torch warns where numpy isn't, and the demo needs none.
        warnings = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), _NUMPY]))
        super().__init__(
            size,
            _make,
            class_name,
            {"ranks": size, **options},
            name=name,
            timeout=timeout,
            preload=(_RANKS, "torch._dynamo"),
            environment={"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": warnings},
        )

    def enter(self) -> str:
        """Let all ranks open their world. Returns torch's version."""
        (release, *_) = self.ask("ready")
        (port,) = self.ask("listen", ranks=range(1))
        self.ask("join", port)
        return release


def _make(rank: int, class_name: str, options: dict[str, Any]) -> Any:
    return getattr(importlib.import_module(_RANKS), class_name)(rank, **options)
