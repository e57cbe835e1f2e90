"""Turning the overlay on and off: what a user's program pays for it, once and each time.

Every repeat is a new process. `first` is the first enable() of a process, the import of what it puts in place included;
`again` is every later one. The target is 50 ms for enable() once torch is imported.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch_overlay

from . import clock, process
from .report import Report, Row, Target

AFTER = ("torch", "torch.distributed.device_mesh", "torch.distributed.tensor")
NAMES = ("import torch_overlay", "first enable", "first disable", "enable again", "disable again")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="processes for each row")
    parser.add_argument("--after", nargs="+", default=list(AFTER), metavar="MODULE", help="what is imported before")
    parser.add_argument("--cycles", type=int, default=20, help="enable and disable again, in each process")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Stock has nothing to turn on: its column holds what importing torch itself takes."""
    for module in arguments.after:
        print(f"enable: after {module}", file=sys.stderr)
        process.fresh("enable:measure", module=module, cycles=1)  # writes the bytecode, as installing the package does
        how = dict(module=module, cycles=arguments.cycles)
        runs = [process.fresh("enable:measure", **how) for _ in range(arguments.repeats)]
        where = {"after": f"import {module}"}
        for clock_name in ("wall", "CPU"):
            for name in NAMES:
                overlay = clock.median(run[clock_name][name] for run in runs)
                report.rows.append(Row(f"{name}, {clock_name}", "s", None, overlay, where))
        report.rows.append(
            Row("the import itself, wall", "s", clock.median(run["import"] for run in runs), None, where)
        )
        for name in ("first enable", "enable again"):
            value = report.row(f"{name}, CPU", after=where["after"]).overlay
            report.targets.append(Target(f"ms of CPU, {name} after import {module}", 1000 * value, 50.0))
    report.notes += [
        "the stock column is the import itself, for scale; wall time counts the machine's other jobs, CPU time doesn't",
        "rows whose modules aren't imported yet wait for them, so the first enable() is cheaper after less",
    ]


def measure(module: str, cycles: int) -> dict[str, Any]:
    """Seconds by step, in a process that has imported `torch_overlay` (the face: no torch) and nothing of torch yet."""
    import importlib

    begun = time.perf_counter()
    importlib.import_module(module)
    imported = time.perf_counter() - begun
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    steps["import torch_overlay"].append(_timed(_import_face_again))
    for cycle in range(cycles + 1):
        when = ("first {}", "{} again")[cycle > 0]
        steps[when.format("enable")].append(_timed(torch_overlay.enable))
        steps[when.format("disable")].append(_timed(torch_overlay.disable))
    return {
        "import": imported,
        "wall": {name: clock.median(pair[0] for pair in pairs) for name, pairs in steps.items()},
        "CPU": {name: clock.median(pair[1] for pair in pairs) for name, pairs in steps.items()},
    }


def _import_face_again() -> None:
    """The face's import as a new process pays it; the module that is loaded already stays the one in use."""
    import importlib

    kept = sys.modules.pop("torch_overlay")
    importlib.import_module("torch_overlay")
    sys.modules["torch_overlay"] = kept


def _timed(call: Any) -> tuple[float, float]:
    """(wall seconds, CPU seconds)."""
    wall, cpu = time.perf_counter(), time.thread_time()
    call()
    return time.perf_counter() - wall, time.thread_time() - cpu
