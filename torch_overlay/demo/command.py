"""The demo's face: reads arguments, lets two runs take turns, prints, and writes what was asked for."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch_overlay.demo import degrees, table
from torch_overlay.demo.config import Config
from torch_overlay.demo.result import Difference, Result, Side
from torch_overlay.demo.screen import Screen
from torch_overlay.demo.worlds import WorkerError, World

_HELP = {
    "ranks": "processes of each run",
    "dp_replicate": "replicas of the whole model (HSDP)",
    "dp_shard": "ranks that FSDP2 shards a replica over",
    "tp": "ranks that share one tensor-parallel layer",
    "ep": "ranks that the experts are spread over; divides dp_shard * tp",
    "width": "width of the residual stream",
    "heads": "attention heads",
    "layers": "blocks; every second one has experts",
    "experts": "experts of a mixture",
    "top_k": "experts that a token goes to",
    "seq": "tokens of a sequence",
    "batch": "sequences of a global step",
    "steps": "training steps; the last one is counted instead of timed",
    "warmup": "first steps that are not timed",
    "rate": "learning rate of AdamW",
    "clip": "largest norm of the gradient",
    "seed": "seed of weights and batches",
    "text_bytes": "bytes of the standard library to learn from",
    "dtype": "type of the weights",
    "timeout": "seconds that a worker may take for an answer",
    "flatten": "call mesh.flatten() on the axes that cut a weight: fewer collectives, in both runs",
}


# Degrees that follow from the others if they aren't given.
_DERIVED = {"dp_replicate": "2 if they fit", "dp_shard": "the ranks that are left", "tp": "2 if it fits", "ep": "as tp"}


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 if both runs came through, 1 if one failed, 2 if the arguments make no sense."""
    return act(_parser().parse_args(argv))


def act(options: argparse.Namespace) -> int:
    """The same for arguments that have been read."""
    given = {field.name: getattr(options, field.name) for field in fields(Config)}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        config = degrees.complete(given)
    except ValueError as error:
        return _refuse(error, degrees.fitting(given))
    try:
        _check_outputs(options)
    except ValueError as error:
        return _refuse(error)
    screen = Screen()
    screen.say_all(table.header(config, screen.width))
    if changed := degrees.changed(config, given):
        screen.say_all(table.chosen(config, changed, screen.width))
    screen.say()
    try:
        result = run(config, screen, control=options.control)
    except RuntimeError as error:  # a worker failed, or ranks disagree; no torch runs in this process
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: stopped", file=sys.stderr)
        return 130
    _report(result, screen)
    _write(result, options, screen)
    return 0


def _refuse(error: ValueError, fitting: Sequence[dict[str, Any]] = ()) -> int:
    print(f"demo: {error}", file=sys.stderr)
    if fitting:
        print(f"demo: these fit: {'; '.join(map(degrees.flags, fitting))}", file=sys.stderr)
    return 2


def _report(result: Result, screen: Screen) -> None:
    width = screen.width
    pages = (table.losses(result, width), table.summary(result, width), table.outcome(result, width))
    for page in pages:
        screen.say()
        screen.say_all(page)
    screen.say(f"\n{result.seconds:.0f} s in all. What next:", "bold")
    for command, what in table.next_commands(result.config):
        screen.say(f"\n  {command}", "bold cyan")
        screen.say(f"      {what}")


def _write(result: Result, options: argparse.Namespace, screen: Screen) -> None:
    if options.json:
        Path(options.json).write_text(json.dumps(result.as_json(), indent=1) + "\n")
    if options.out:
        from torch_overlay.demo.plot import draw  # the only thing here that needs matplotlib

        draw(result, options.out)
    for path in filter(None, (options.json, options.out)):
        screen.say(f"written: {path}")


def run(config: Config, screen: Screen, control: bool = False) -> Result:
    """Both runs, in turns, so that whatever else the machine does meets both. `control` runs stock against stock."""
    start = time.perf_counter()
    result = Result(config, Side("stock"), Side("stock again" if control else "overlay"))
    with screen.progress(_SET_UP + 2 * config.steps):
        screen.now(f"starting {2 * config.ranks} processes, each with its own torch")
        with World(result.first.name, config, False) as first, World(result.second.name, config, not control) as second:
            worlds = [(first, result.first), (second, result.second)]
            for world, side in worlds:
                side.torch, side.patches = world.ask("ready")[0]  # all of them, before anything is timed
                screen.advance()
            for world, side in worlds:
                screen.now(f"{side.name}: making meshes, model and optimizer")
                _set_up(world, side)
                screen.advance()
                screen.say(table.set_up(side))
            _train(worlds, result, screen)
            screen.now("gathering the weights, to compare them")
            _gather(worlds, result)
            for world, side in worlds:
                side.add_facts(world.ask("finish"))
                screen.advance()
            screen.now("done; the processes end")
    result.seconds = time.perf_counter() - start
    return result


_SET_UP = 6  # what `progress` counts besides steps
_GATHERS = 5  # full saves that are timed


def _set_up(world: World, side: Side) -> None:
    (port,) = world.ask("listen", ranks=range(1))
    world.ask("join", port)
    side.build_seconds = max(facts["build_seconds"] for facts in world.ask("build"))
    if len(set(world.ask("prepare"))) > 1:
        raise WorkerError(f"{side.name}: ranks read different texts")


def _train(worlds: list[tuple[World, Side]], result: Result, screen: Screen) -> None:
    config = result.config
    screen.say(f"\n{table.progress_header(*result.sides)}", "bold")
    for world, side in worlds:
        screen.now(f"{side.name}: first steps")
        side.add_steps(world.ask("train", 0, config.warmup), timed=False)
        screen.advance(config.warmup)
    screen.say(table.progress(result))
    last = config.steps - 1
    turn = max(1, min(4, (last - config.warmup) // 4))
    for first in range(config.warmup, last, turn):
        for world, side in worlds:
            screen.now(f"{side.name}: training", line=False)
            count = min(turn, last - first)
            side.add_steps(world.ask("train", first, count), timed=True)
            screen.advance(count)
        worlds.reverse()  # who went second goes first: neither always runs on what the other left warm
        screen.say(table.progress(result))
    worlds.sort(key=lambda pair: pair[1] is result.second)
    for world, side in worlds:
        screen.now(f"{side.name}: the last step, with its collectives counted")
        answers = world.ask("count", last)
        side.add_loss([loss for loss, _ in answers])
        side.collectives = max((counts for _, counts in answers), key=lambda counts: sum(counts.values()))
        screen.advance()


def _gather(worlds: list[tuple[World, Side]], result: Result) -> None:
    """What a full save takes, and how far the weights of the two runs are apart."""
    for world, side in worlds:
        side.add_facts(world.ask("gather"))
    for _ in range(_GATHERS):
        for world, side in worlds:
            side.state_seconds.append(max(world.ask("gather_again")))
    (first, _), (second, _) = worlds
    with tempfile.TemporaryDirectory(prefix="torch_overlay_demo_") as folder:
        path = os.path.join(folder, "weights.pt")
        first.ask("keep_weights", path, ranks=range(1))
        result.weights = Difference(**second.ask("compare_weights", path, ranks=range(1))[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torch-overlay demo",
        description="Train one small model twice, on stock torch and under the overlay, and compare.",
    )
    for field in fields(Config):
        flag, words = f"--{field.name.replace('_', '-')}", _HELP[field.name]
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true", default=None, help=words)
            continue
        parser.add_argument(
            flag,
            type=type(field.default),
            help=f"{words} (default: {_DERIVED.get(field.name, field.default)})",
            choices=("float32", "float64") if field.name == "dtype" else None,
            metavar=None if field.name == "dtype" else "N",
        )
    parser.add_argument("--json", metavar="FILE", help="write all numbers to FILE")
    parser.add_argument("--out", "--plot", metavar="FILE.png", help="draw the result (needs matplotlib)")
    parser.add_argument("--control", action="store_true", help="run stock against stock: the machine's noise")
    return parser


def _check_outputs(options: argparse.Namespace) -> None:
    """Say now what would else spoil the end of a run that takes a minute."""
    for path in filter(None, (options.json, options.out)):
        if not Path(path).absolute().parent.is_dir():
            raise ValueError(f"the folder of {path} must exist")
    if options.out and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--out needs matplotlib: python -m pip install matplotlib")
