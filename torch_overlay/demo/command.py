"""The demo's face: reads arguments, runs the panels or the training, prints, and says what to go on with."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_overlay.demo import panels, train
from torch_overlay.demo.config import Config
from torch_overlay.demo.screen import Screen

TRAINED = Config(ranks=4, dp_replicate=1, steps=14)  # two meshes of two axes: FSDP2 x TP, and FSDP2 x EP


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 if it came through, 1 if a process failed, 2 if the arguments make no sense."""
    return act(_parser().parse_args(argv))


def act(options: argparse.Namespace) -> int:
    """The same for arguments that have been read."""
    try:
        config = replace(TRAINED, steps=options.steps, device=options.device)
        if options.json and not Path(options.json).absolute().parent.is_dir():
            raise ValueError(f"the folder of {options.json} must exist")
    except ValueError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    screen, start = Screen(), time.perf_counter()
    try:
        found = train.run(config, screen) if options.train else run(screen, options.device)
    except RuntimeError as error:  # a rank failed; no torch runs in this process
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: stopped", file=sys.stderr)
        return 130
    screen.say(f"\n{time.perf_counter() - start:.0f} s in all. To go on:", "bold")
    for line, what in next_commands(options.train):
        screen.say(f"\n  {line}", "bold cyan")
        screen.say(f"      {what}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


def run(screen: Screen, device: str = "cpu") -> dict[str, Any]:
    """All panels, each shown as soon as it is measured; what was measured."""
    where = "gloo processes of this machine" if device == "cpu" else "processes with the GPUs of this machine"
    screen.say(f"What torch_overlay changes, on {where}.", "bold")
    screen.say()
    found: dict[str, Any] = {}
    with screen.progress(panels.STEPS):
        for measure, show in (
            (panels.weights, panels.show_weights),
            (panels.meshes, panels.show_meshes),
            (panels.gathers, panels.show_gathers),
        ):
            if found:
                screen.say()
            found[measure.__name__] = measure(screen, device)
            show(found[measure.__name__], screen)
    return found


def next_commands(trained: bool) -> list[tuple[str, str]]:
    """Three things to type next, and what for."""
    program = command()
    other = (f"{program} demo --train", "a mixture of experts, trained on stock torch and under the overlay")
    if trained:
        other = (
            f"{program} demo",
            "weights, a hang that explains itself, a value that is wrong on stock",
        )
    explain = f"{program} explain --mesh 2,2 --flattened a,b --shape 5 S0,S0 R,R"
    return [
        (f"{program} run your_script.py", "your own program under the overlay, as it is; torchrun works there, too"),
        (explain, "that redistribution, by stock and by the overlay"),
        other,
    ]


def command() -> str:
    """How this program is called here: by name if it is on PATH, else by its path, else by its Python."""
    if shutil.which("torch-overlay"):
        return "torch-overlay"
    beside = os.path.join(os.path.dirname(sys.executable), "torch-overlay")
    if os.path.exists(beside):
        return min(beside, os.path.relpath(beside), key=len)
    return f"{min(sys.executable, os.path.relpath(sys.executable), key=len)} -m torch_overlay"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torch-overlay demo",
        description="Weights from a trainer to its servers, a job that hangs, a redistribution that stock gets wrong.",
    )
    parser.add_argument(
        "--train", action="store_true", help="train a model instead, on stock torch and under the overlay"
    )
    parser.add_argument(
        "--steps", type=int, default=TRAINED.steps, metavar="N", help="of --train (default: %(default)s)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are; ranks may share a GPU"
    )
    parser.add_argument("--json", metavar="FILE", help="write all numbers to FILE")
    return parser
