"""What a rank of `demo --train` does."""

from __future__ import annotations

import time
from typing import Any

import torch

from torch_overlay.demo.config import Config
from torch_overlay.demo.counters import GroupCounter, count_collectives
from torch_overlay.demo.meshes import build_meshes
from torch_overlay.demo.ranks import Rank, timed
from torch_overlay.demo.training import Trainer


class TrainingRank(Rank):
    """Trains the model of a config, and counts what that takes."""

    def __init__(self, rank: int, ranks: int, overlay: bool, config: Config) -> None:
        super().__init__(rank, ranks, overlay, device=config.device)
        self.config = config

    def build(self) -> str:
        """Make meshes, model and optimizer; a digest of the text, which is the same on all ranks."""
        self.counter = GroupCounter()
        self.trainer = Trainer(self.config, build_meshes(self.config))
        return self.trainer.text.digest

    def train(self, first: int, count: int) -> list[tuple[float, float]]:
        """(loss, seconds) of each of `count` steps."""
        answers = []
        for step in range(first, first + count):
            start = time.perf_counter()
            loss = self.trainer.step(step)
            answers.append((loss, time.perf_counter() - start))
        return answers

    def count(self, step: int) -> dict[str, float]:
        """Train one step with its collectives counted, and make the weights whole."""
        loss, in_a_step = count_collectives(lambda: self.trainer.step(step))
        self.state, in_a_save = count_collectives(self.trainer.full_state)
        return {
            "loss": loss,
            "groups": self.counter.groups(),
            "calls": self.counter.calls,
            "step": sum(in_a_step.values()),
            "save": sum(in_a_save.values()),
            "seconds": timed(self.trainer.full_state),
        }

    def keep_weights(self, path: str) -> None:
        """Write the weights that `count` made whole, for another run to compare."""
        torch.save(self.state, path)

    def compare_weights(self, path: str) -> dict[str, Any]:
        """How far the weights are from those in a file."""
        return weights_apart(torch.load(path), self.state)


def weights_apart(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> dict[str, Any]:
    """How many numbers are compared and differ, and the largest difference.

    >>> weights_apart({"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([1.0, -2.5])})
    {'elements': 2, 'different': 1, 'largest': 0.5}
    """
    pairs = [(one, ours[name]) for name, one in theirs.items()]
    return {
        "elements": sum(one.numel() for one, _ in pairs),
        "different": sum(int((one != other).sum()) for one, other in pairs),
        "largest": max((one - other).abs().max().item() for one, other in pairs),
    }
