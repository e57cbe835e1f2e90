"""What a run came to: numbers of one side, and of two sides compared."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from torch_overlay.demo.config import Config


@dataclass
class Side:
    """One run. Counts are of the rank that has most, times (seconds) of the slowest rank, losses in nats a byte."""

    name: str
    torch: str = ""
    patches: int = 0  # of torch's objects that the overlay replaced or added
    build_seconds: float = 0.0
    groups: int = 0
    new_group_calls: int = 0
    threads: int | None = None
    sockets: int | None = None
    collectives: dict[str, int] = field(default_factory=dict)
    parameters: int = 0
    elements: int = 0
    state_collectives: int = 0
    state_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)  # of timed steps only

    def add_steps(self, answers: list[list[tuple[float, float]]], timed: bool) -> None:
        """Take each rank's (loss, seconds) of some steps."""
        for ranks in zip(*answers, strict=True):
            self.add_loss([loss for loss, _ in ranks])
            if timed:
                self.step_seconds.append(max(seconds for _, seconds in ranks))

    def add_loss(self, losses: list[float]) -> None:
        """Take each rank's loss of a step. Raises RuntimeError if they aren't one number: then the run is wrong."""
        if len(set(losses)) > 1:
            raise RuntimeError(f"{self.name}: ranks disagree on the loss of step {len(self.losses)}: {losses}")
        self.losses.append(losses[0])

    def add_facts(self, facts: list[dict[str, Any]]) -> None:
        """Take what each rank's `gather` and `finish` say."""
        for name in facts[0].keys() - {"threads_and_sockets"}:
            setattr(self, name, max(rank[name] for rank in facts))
        costs = [rank.get("threads_and_sockets") for rank in facts]
        if all(costs):
            self.threads, self.sockets = (max(cost[i] for cost in costs if cost) for i in (0, 1))

    @property
    def collectives_per_step(self) -> int:
        return sum(self.collectives.values())

    def tokens_per_second(self, config: Config) -> float:
        """By the median step, which a busy moment of the machine doesn't move."""
        return config.tokens_per_step / statistics.median(self.step_seconds)


@dataclass(frozen=True)
class Difference:
    """How far the trained weights of two runs are apart.

    Attributes:
        elements: that are compared, and `different` how many of them are not equal to the last bit.
        largest: the largest difference, of an element of the weight `name`.
        scale: the largest absolute value in that weight, to see how small `largest` is.
    """

    elements: int
    different: int = 0
    largest: float = 0.0
    name: str = ""
    scale: float = 0.0


@dataclass
class Result:
    """Two runs of one config."""

    config: Config
    first: Side
    second: Side
    weights: Difference = field(default_factory=lambda: Difference(0))
    seconds: float = 0.0

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.first, self.second

    @property
    def control(self) -> bool:
        """Whether stock runs against itself."""
        return not self.second.patches

    @property
    def loss_difference(self) -> float:
        """The largest difference between the two runs' losses of the same step."""
        return max(abs(a - b) for a, b in zip(self.first.losses, self.second.losses, strict=True))

    @property
    def same_weights(self) -> bool:
        """Whether the trained weights are equal to the last bit."""
        return self.weights.different == 0

    def as_json(self) -> dict[str, Any]:
        sides = {
            side.name: asdict(side)
            | {
                "collectives_per_step": side.collectives_per_step,
                "tokens_per_second": side.tokens_per_second(self.config),
            }
            for side in self.sides
        }
        return {
            "config": asdict(self.config),
            "sides": sides,
            "loss_difference": self.loss_difference,
            "same_weights": self.same_weights,
            "weights": asdict(self.weights),
            "seconds": self.seconds,
        }
