"""`python -m torch_overlay demo`: runs the four panels, prints them, and suggests commands to try next."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from ..show.screen import Screen, Styled
from . import panels


def add_demo(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [OPTION...]"
    parser.description = (
        "Weights from a trainer to its servers, a server that is killed, a job that hangs, a redistribution that stock "
        "gets wrong."
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are; ranks may share a GPU"
    )
    parser.add_argument("--json", metavar="FILE", help="write all numbers to FILE")


def demo(options: argparse.Namespace) -> int:
    """Run the demo. Returns 0, or 1 if a process failed, 2 for wrong arguments, 130 if it was interrupted."""
    if options.json and not Path(options.json).absolute().parent.is_dir():
        print(f"demo: the folder of {options.json} must exist", file=sys.stderr)
        return 2
    screen, start = Screen(), time.perf_counter()
    try:
        figures = run(screen, options.device)
    except RuntimeError as error:  # a rank failed: this process runs no torch
        why = why_not_on_gpus(str(error)) if options.device == "cuda" else None
        print(f"\ndemo: {why or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: stopped", file=sys.stderr)
        return 130
    screen.say("", Styled(f"{time.perf_counter() - start:.0f} s in all. To go on:", "head"))
    for line, what in next_commands():
        screen.say("", Styled(f"  {line}", "side"), f"      {what}")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def run(screen: Screen, device: str) -> dict[str, Any]:
    """Measure each panel and print it. Returns what was measured, by panel."""
    where = "gloo processes of this machine" if device == "cpu" else "processes with the GPUs of this machine"
    screen.say(Styled(f"What torch_overlay changes, on {where}.", "head"))
    figures: dict[str, Any] = {}
    with screen.progress(panels.STEPS):
        for measure, lines in (
            (panels.weights, panels.show_weights),
            (panels.killed, panels.show_killed),
            (panels.meshes, panels.show_meshes),
            (panels.gathers, panels.show_gathers),
        ):
            screen.say("")
            figures[measure.__name__] = measure(screen, device)
            screen.say(*lines(figures[measure.__name__], screen.width))
    return figures


def why_not_on_gpus(error: str) -> str | None:
    """A line on an error of ranks with GPUs that isn't of this package; None for any other error.

    On an H100 that ranks shared, gloo lost its connections as soon as it moved CUDA tensors, on stock torch as well:
    with "Connection closed by peer", or without an answer.
    """
    if panels.NO_GPU in error:
        return panels.NO_GPU
    said = [line for line in error.splitlines() if "gloo" in line or "no answer to" in line]
    if said:
        return (
            "--device cuda: where there are fewer GPUs than ranks (6 at most) they talk by gloo, which loses "
            "connections with CUDA tensors on some machines, on stock torch as well. Leave --device out to run on the "
            "CPU. It was: " + said[-1]
        )
    return None


def next_commands() -> list[tuple[str, str]]:
    """Two command lines to try next, each with what it does."""
    program = command()
    explain = f"{program} explain --mesh 2,2 --flattened a,b --shape 5 S0,S0 R,R"
    return [
        (f"{program} run your_script.py", "your own program under the overlay, as it is; torchrun works there, too"),
        (explain, "the overlay's plan for that redistribution"),
    ]


def command() -> str:
    """How to start this program here: by its name if it is on PATH, else by its path, else by Python."""
    if shutil.which("torch-overlay"):
        return "torch-overlay"
    beside = os.path.join(os.path.dirname(sys.executable), "torch-overlay")
    if os.path.exists(beside):
        return min(beside, os.path.relpath(beside), key=len)
    return f"{min(sys.executable, os.path.relpath(sys.executable), key=len)} -m torch_overlay"
