"""`demo --train`: one training job, once on stock torch and once under the overlay, side by side."""

from __future__ import annotations

import os
import statistics
import tempfile
from dataclasses import dataclass
from typing import Any

from ..show.screen import Screen
from ..show.words import wrapped
from .panels import compared
from .processes import Processes, WorkerError

_SIDES = {"stock": False, "overlay": True}


@dataclass(frozen=True)
class Config:
    """Everything that a worker must know, the same on every rank and in both runs.

    Degrees count ranks, and experts spread over `ep` of the `dp_shard * tp` ranks of one replica. Sizes count elements,
    `batch` sequences of a global step, `seq` tokens. By default two meshes of two axes: FSDP2 x TP, and FSDP2 x EP.

    Raises ValueError with what was needed and what came if the steps are too few.
    """

    dp_replicate: int = 1
    dp_shard: int = 2
    tp: int = 2
    ep: int = 2
    width: int = 64
    heads: int = 4
    layers: int = 2
    experts: int = 4
    top_k: int = 2
    seq: int = 64
    batch: int = 16
    steps: int = 14
    warmup: int = 2
    rate: float = 3e-3
    clip: float = 1.0
    seed: int = 0
    text_bytes: int = 1_000_000
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.steps < self.warmup + 2:
            raise ValueError(
                f"steps must be at least warmup + 2 (a step to time, a step to count), with warmup at least 1; "
                f"got {self.steps} steps and warmup {self.warmup}"
            )

    @property
    def ranks(self) -> int:
        """Of a run."""
        return self.dp_replicate * self.dp_shard * self.tp


def run(config: Config, screen: Screen) -> dict[str, Any]:
    """Both runs, in turns, so that whatever else the machine does meets both; what was measured, by side."""
    c = config
    what = (
        f"One training job, twice: {c.ranks} {'gloo' if c.device == 'cpu' else c.device} processes learn {c.steps} "
        f"steps of {c.batch * c.seq:,} bytes of Python with a transformer of {c.layers} layers and {c.experts} "
        f"experts, by FSDP2 ({c.dp_replicate}x{c.dp_shard}), "
        f"tensor parallelism ({c.tp}) and expert parallelism ({c.ep})."
    )
    screen.say(*wrapped(what, width=screen.width), "")
    with screen.progress(4 + 2 * c.steps):
        screen.now(f"starting {2 * c.ranks} processes")
        stock, overlay = [Processes(name, "TrainingRank", c.ranks, overlay=on, config=c) for name, on in _SIDES.items()]
        with stock, overlay:
            found = _measured([stock, overlay], config, screen)
    screen.say("", *_table(found), "", *wrapped(_verdict(found), width=screen.width))
    return found


def _measured(worlds: list[Processes], config: Config, screen: Screen) -> dict[str, Any]:
    found: dict[str, Any] = {world.name: {"losses": [], "seconds": []} for world in worlds}
    for world in worlds:
        screen.now(f"{world.name}: making meshes, model and optimizer")
        world.enter()
        if len(set(world.ask("build"))) > 1:
            raise WorkerError(f"{world.name}: ranks read different texts")
        screen.advance()
    turn, last = max(1, (config.steps - config.warmup) // 4), config.steps - 1
    for first in [0, *range(config.warmup, last, turn)]:
        count = config.warmup if first == 0 else min(turn, last - first)
        for world in worlds:
            screen.now(f"{world.name}: steps {first + 1} to {first + count} of {config.steps}")
            for step in zip(*world.ask("train", first, count), strict=True):
                _add_loss(world.name, found[world.name], [loss for loss, _ in step])
                found[world.name]["seconds"] += [max(seconds for _, seconds in step)] if first else []
            screen.advance(count)
        worlds = worlds[::-1]  # neither always runs on what the other left warm
    for world in worlds:
        screen.now(f"{world.name}: the last step and a full save, with their collectives counted")
        answers = world.ask("count", last)
        _add_loss(world.name, found[world.name], [answer["loss"] for answer in answers])
        found[world.name]["counts"] = {name: max(answer[name] for answer in answers) for name in answers[0]}
        screen.advance(2)
    with tempfile.TemporaryDirectory(prefix="torch_overlay_demo_") as folder:
        path = os.path.join(folder, "weights.pt")
        worlds[0].ask("keep_weights", path, ranks=range(1))
        found["weights"] = worlds[1].ask("compare_weights", path, ranks=range(1))[0]
    return found


def _add_loss(name: str, side: dict[str, Any], losses: list[float]) -> None:
    """Raises WorkerError if the ranks' losses aren't one number: then the run is wrong."""
    if len(set(losses)) > 1:
        raise WorkerError(f"{name}: ranks disagree on the loss of step {len(side['losses'])}: {losses}")
    side["losses"].append(losses[0])


def _table(found: dict[str, Any]) -> list[str]:
    one, other = [found[side]["counts"] for side in _SIDES]
    medians = [1000 * statistics.median(found[side]["seconds"]) for side in _SIDES]
    rows = [
        ("new_group calls of a rank", one["calls"], other["calls"], 0),
        ("process groups of a rank", one["groups"], other["groups"], 0),
        ("collectives of a step", one["step"], other["step"], 0),
        ("collectives of a full state dict", one["save"], other["save"], 0),
        ("time of a full state dict, ms", 1000 * one["seconds"], 1000 * other["seconds"], 0),
        ("time of a step, ms (median)", *medians, 0),
    ]
    return compared(("stock", "overlay"), rows)


def _verdict(found: dict[str, Any]) -> str:
    losses, weights = [found[side]["losses"] for side in _SIDES], found["weights"]
    largest = max(abs(one - other) for one, other in zip(*losses, strict=True))
    said = f"Loss: {losses[0][0]:.3f} at the first step, {losses[0][-1]:.3f} at the last; at most {largest:.2g} apart. "
    if not weights["different"]:
        return f"{said}All {weights['elements']:,} weights are equal to the last bit."
    apart = f"{weights['different']:,} of {weights['elements']:,} weights differ, at most by {weights['largest']:.2g}"
    return (
        f"{said}{apart}: the gradient is clipped by a norm, of which stock takes a root after each axis, and the "
        "overlay one, of the whole sum (docs/developers/numerics.md)."
    )
