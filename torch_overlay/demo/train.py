"""`demo --train`: one training job, once on stock torch and once under the overlay, side by side."""

from __future__ import annotations

import os
import statistics
import tempfile
from typing import Any

from torch_overlay.demo import table
from torch_overlay.demo.config import Config
from torch_overlay.demo.screen import Screen
from torch_overlay.demo.worlds import WorkerError, World
from torch_overlay.show.words import wrapped

_RANKS = "torch_overlay.demo.training_ranks:TrainingRank"
_SIDES = {"stock": False, "overlay": True}


def run(config: Config, screen: Screen) -> dict[str, Any]:
    """Both runs, in turns, so that whatever else the machine does meets both; what was measured, by side."""
    c = config
    screen.say_all(
        (line, "")
        for line in wrapped(
            f"One training job, twice: {c.ranks} {'gloo' if c.device == 'cpu' else c.device} processes learn {c.steps} "
            f"steps of {c.tokens_per_step:,} bytes "
            f"of Python with a transformer of {c.layers} layers and {c.experts} experts, by FSDP2 ({c.dp_replicate}x"
            f"{c.dp_shard}), tensor parallelism ({c.tp}) and expert parallelism ({c.ep}).",
            width=screen.width,
        )
    )
    screen.say()
    with screen.progress(4 + 2 * c.steps):
        screen.now(f"starting {2 * c.ranks} processes")
        stock, overlay = [World(name, _RANKS, c.ranks, overlay=on, config=c) for name, on in _SIDES.items()]
        with stock, overlay:
            found = _measured([stock, overlay], config, screen)
    screen.say()
    screen.say_all((line, "bold" if number == 0 else "") for number, line in enumerate(_table(found, config)))
    screen.say()
    screen.say_all((line, "") for line in wrapped(_verdict(found), width=screen.width))
    return found


def _measured(worlds: list[World], config: Config, screen: Screen) -> dict[str, Any]:
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


def _table(found: dict[str, Any], config: Config) -> list[str]:
    rows = {"calls": "new_group calls of a rank", "groups": "process groups of a rank", "step": "collectives of a step"}
    rows["save"] = "collectives of a full state dict"
    counts = [found[side]["counts"] for side in _SIDES]
    lines: list[Any] = [(label, *(count[name] for count in counts), 0) for name, label in rows.items()]
    lines.append(("time of a full state dict, ms", *(1000 * count["seconds"] for count in counts), 0))
    medians = [1000 * statistics.median(found[side]["seconds"]) for side in _SIDES]
    lines.append(("time of a step, ms (median)", *medians, 0))
    return table.compared(("stock", "overlay"), lines)


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
