"""`python -m torch_overlay demo`: runs the panels, prints, and says what to go on with."""

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
    """What it takes."""
    parser.usage = "%(prog)s [OPTION...]"
    parser.description = (
        "Weights from a trainer to its servers, a job that hangs, a redistribution that stock gets wrong."
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are; ranks may share a GPU"
    )
    parser.add_argument("--json", metavar="FILE", help="write all numbers to FILE")


def demo(options: argparse.Namespace) -> int:
    """Run it; 0 if it came through, 1 if a process failed, 2 if the arguments make no sense."""
    if options.json and not Path(options.json).absolute().parent.is_dir():
        print(f"demo: the folder of {options.json} must exist", file=sys.stderr)
        return 2
    screen, start = Screen(), time.perf_counter()
    try:
        found = run(screen, options.device)
    except RuntimeError as error:  # a rank failed; no torch runs in this process
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: stopped", file=sys.stderr)
        return 130
    screen.say("", Styled(f"{time.perf_counter() - start:.0f} s in all. To go on:", "head"))
    for line, what in next_commands():
        screen.say("", Styled(f"  {line}", "side"), f"      {what}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


def run(screen: Screen, device: str) -> dict[str, Any]:
    """All panels, each shown as soon as it is measured; what was measured."""
    where = "gloo processes of this machine" if device == "cpu" else "processes with the GPUs of this machine"
    screen.say(Styled(f"What torch_overlay changes, on {where}.", "head"))
    found: dict[str, Any] = {}
    with screen.progress(panels.STEPS):
        for measure, shown in (
            (panels.weights, panels.show_weights),
            (panels.meshes, panels.show_meshes),
            (panels.gathers, panels.show_gathers),
        ):
            screen.say("")
            found[measure.__name__] = measure(screen, device)
            screen.say(*shown(found[measure.__name__], screen.width))
    return found


def next_commands() -> list[tuple[str, str]]:
    """Two things to type next, and what for."""
    program = command()
    explain = f"{program} explain --mesh 2,2 --flattened a,b --shape 5 S0,S0 R,R"
    return [
        (f"{program} run your_script.py", "your own program under the overlay, as it is; torchrun works there, too"),
        (explain, "the overlay's plan for that redistribution"),
    ]


def command() -> str:
    """How this program is called here: by name if it is on PATH, else by its path, else by its Python."""
    if shutil.which("torch-overlay"):
        return "torch-overlay"
    beside = os.path.join(os.path.dirname(sys.executable), "torch-overlay")
    if os.path.exists(beside):
        return min(beside, os.path.relpath(beside), key=len)
    return f"{min(sys.executable, os.path.relpath(sys.executable), key=len)} -m torch_overlay"
