"""The demo's face: reads arguments, lets two runs take turns, prints, and writes what was asked for."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from dataclasses import fields
from pathlib import Path

from torch_overlay.demo import table
from torch_overlay.demo.config import Config
from torch_overlay.demo.result import Result, Side
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
}


# Degrees that follow from the others if they aren't given.
_DERIVED = {"dp_replicate": "2 if they fit", "dp_shard": "the ranks that are left", "ep": "as tp"}


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 if both runs came through, 1 if one failed, 2 if the arguments make no sense."""
    options = _parser().parse_args(argv)
    try:
        config = _config(options)
        _check_outputs(options)
    except ValueError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    try:
        result = run(config, control=options.control)
    except RuntimeError as error:  # a worker failed, or ranks disagree; no torch runs in this process
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: stopped", file=sys.stderr)
        return 130
    print(f"\n{table.losses(result)}\n\n{table.summary(result)}\n{result.seconds:.0f} s in all")
    if options.json:
        Path(options.json).write_text(json.dumps(result.as_json(), indent=1) + "\n")
    if options.plot:
        from torch_overlay.demo.plot import draw  # the only thing here that needs matplotlib

        draw(result, options.plot)
    return 0


def run(config: Config, control: bool = False) -> Result:
    """Both runs, in turns, so that whatever else the machine does meets both. `control` runs stock against stock."""
    start = time.perf_counter()
    result = Result(config, Side("stock"), Side("stock again" if control else "overlay"))
    print(table.header(config), flush=True)
    with World(result.first.name, config, False) as first, World(result.second.name, config, not control) as second:
        worlds = [(first, result.first), (second, result.second)]
        for world, side in worlds:
            side.torch, side.patches = world.ask("ready")[0]  # all of them, before anything is timed
        for world, side in worlds:
            _set_up(world, side)
            print(table.set_up(side), flush=True)
        print(f"\n{table.progress_header(*result.sides)}", flush=True)
        _train(worlds, result)
        for world, side in worlds:
            side.add_facts(world.ask("finish"))
    result.seconds = time.perf_counter() - start
    return result


def _set_up(world: World, side: Side) -> None:
    (port,) = world.ask("listen", ranks=range(1))
    world.ask("join", port)
    side.build_seconds = max(facts["build_seconds"] for facts in world.ask("build"))
    if len(set(world.ask("prepare"))) > 1:
        raise WorkerError(f"{side.name}: ranks read different texts")


def _train(worlds: list[tuple[World, Side]], result: Result) -> None:
    config = result.config
    for world, side in worlds:
        side.add_steps(world.ask("train", 0, config.warmup), timed=False)
    print(table.progress(result), flush=True)
    last = config.steps - 1
    turn = max(1, min(4, (last - config.warmup) // 4))
    for first in range(config.warmup, last, turn):
        for world, side in worlds:
            side.add_steps(world.ask("train", first, min(turn, last - first)), timed=True)
        worlds.reverse()  # who went second goes first: neither always runs on what the other left warm
        print(table.progress(result), flush=True)
    for world, side in worlds:
        answers = world.ask("count", last)
        side.add_loss([loss for loss, _ in answers])
        side.collectives = max((counts for _, counts in answers), key=lambda counts: sum(counts.values()))
    worlds.sort(key=lambda pair: pair[1] is result.second)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_overlay demo",
        description="Train one small model twice, on stock torch and under the overlay, and compare.",
    )
    for field in fields(Config):
        derived = field.name in _DERIVED
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            default=None if derived else field.default,
            help=f"{_HELP[field.name]} (default: {_DERIVED.get(field.name, field.default)})",
            choices=("float32", "float64") if field.name == "dtype" else None,
            metavar=None if field.name == "dtype" else "N",
        )
    parser.add_argument("--json", metavar="FILE", help="write all numbers to FILE")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the result (needs matplotlib)")
    parser.add_argument("--control", action="store_true", help="run stock against stock: the machine's noise")
    return parser


def _check_outputs(options: argparse.Namespace) -> None:
    """Say now what would else spoil the end of a run that takes a minute."""
    for path in filter(None, (options.json, options.plot)):
        if not Path(path).absolute().parent.is_dir():
            raise ValueError(f"the folder of {path} must exist")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: python -m pip install matplotlib")


def _config(options: argparse.Namespace) -> Config:
    """Degrees that aren't given follow from the others: two replicas if they fit, and the rest is sharded."""
    given = {field.name: getattr(options, field.name) for field in fields(Config)}
    ranks, tp = given["ranks"], given["tp"]
    if min(ranks, tp) >= 1:
        known = given["dp_shard"] or 2
        given["dp_replicate"] = given["dp_replicate"] or (2 if ranks % (2 * known * tp) == 0 else 1)
        given["dp_shard"] = given["dp_shard"] or max(1, ranks // (tp * given["dp_replicate"]))
    given["ep"] = given["ep"] or tp
    return Config(**given)
