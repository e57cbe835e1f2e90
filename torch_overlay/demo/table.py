"""The demo's pages: what it prints before, while and after it runs, as lines with styles."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from torch_overlay.demo.config import Config
from torch_overlay.demo.degrees import flags
from torch_overlay.demo.result import Result, Side
from torch_overlay.demo.rows import Row, sections, verdict
from torch_overlay.demo.screen import Styled
from torch_overlay.show.columns import aligned, wrapped

_BESIDE = 110  # columns from which on the words stand beside the numbers
_WORDS, _GAIN, _LOSS = "dim", "bold green", "yellow"


def header(config: Config, width: int) -> list[Styled]:
    """What is about to run."""
    c = config
    replicas = f"dp_replicate {c.dp_replicate} x " if c.dp_replicate > 1 else ""
    meshes = [
        ("dense weights", f"{replicas}fsdp {c.dp_shard} x tp {c.tp}", "FSDP2 and tensor parallel"),
        ("experts", f"{replicas}efsdp {c.efsdp} x ep {c.ep}", "FSDP2 and expert parallel"),
        ("batches", f"batch {c.dp} x tp {c.tp}", "who reads what"),
    ]
    text = (
        f"One training job, twice on this machine: on stock torch, and under torch_overlay. {c.ranks} gloo processes "
        f"each learn {c.steps} steps of {c.tokens_per_step:,} bytes of the Python standard library with a transformer "
        f"of {c.layers} layers of width {c.width}, {c.experts} experts in every second one."
    )
    return [*_plain(wrapped(text, "", width)), ("", ""), *_plain(aligned([(f"  {a}", b, c) for a, b, c in meshes]))]


def chosen(config: Config, changed: Mapping[str, Any], width: int) -> list[Styled]:
    """What was chosen to fit the ranks, where the defaults don't."""
    text = f"To fit {config.ranks} ranks: {flags(changed)}."
    if config.tp == 1 and config.ranks > 2:
        text += " With an even number of ranks there is tensor parallelism too: 4 or 8 show more."
    return [("", ""), *_plain(wrapped(text, "", width))]


def set_up(side: Side) -> str:
    """One line: which torch a run is on, and how long its meshes took."""
    patches = f" with {side.patches} patches" if side.patches else ""
    return f"{side.name}: torch {side.torch}{patches}, meshes made in {1000 * side.build_seconds:.0f} ms"


def progress_header(first: Side, second: Side) -> str:
    titles = (f"{f'{what} {side.name}':>17}" for what in ("loss", "tok/s") for side in (first, second))
    return f"{'step':>9}{''.join(titles)}"


def progress(result: Result) -> str:
    """One line: the last step's losses and the speed so far."""
    done = f"{len(result.first.losses)}/{result.config.steps}"
    losses = "".join(f"{side.losses[-1]:17.6f}" for side in result.sides)
    return f"{done:>9}{losses}{''.join(_speed(side, result.config) for side in result.sides)}"


def _speed(side: Side, config: Config) -> str:
    return f"{side.tokens_per_second(config):17,.0f}" if side.step_seconds else f"{'warm-up':>17}"


def summary(result: Result, width: int) -> list[Styled]:
    """The table: a row for each thing measured, both runs, how many times better, and why."""
    first, second = result.sides
    found = sections(result)
    heads = Row("", first.name, second.name, "better")
    rows = [heads, *(row for rows in found for row in rows)]
    numbers = aligned([(row.label, row.first, row.second, row.better) for row in rows], right=(1, 2, 3))
    left = max(map(len, numbers))
    beside = width >= _BESIDE
    rule = ("-" * (width if beside else left), _WORDS)
    lines: list[Styled] = [(numbers[0], "bold"), rule]
    at = 1
    for group in found:
        for row, line in zip(group, numbers[at:]):
            lines += _beside(row, line, left, width) if beside else _below(row, line, width)
        lines.append(rule)
        at += len(group)
    return lines


def _beside(row: Row, line: str, left: int, width: int) -> list[Styled]:
    words = wrapped(row.why, "", width - left - 3)
    first = f"{line:{left}}   {words[0]}" if words else line
    return [(first, _style(row)), *((f"{'':{left}}   {more}", _WORDS) for more in words[1:])]


def _below(row: Row, line: str, width: int) -> list[Styled]:
    return [(line, _style(row)), *((words, _WORDS) for words in wrapped(row.why, "    ", width))]


def _style(row: Row) -> str:
    if not row.better.endswith("x"):
        return ""
    gain = float(row.better[:-1].replace(",", ""))
    return _GAIN if gain >= 1.1 else _LOSS if gain < 0.95 else ""


def outcome(result: Result, width: int) -> list[Styled]:
    """What both runs learned, and how far they are apart."""
    return [line for text in verdict(result) for line in _plain(wrapped(text, "", width))]


def losses(result: Result, width: int) -> list[Styled]:
    """The loss of every step in both runs; once if they are equal."""
    sides = result.sides if result.loss_difference else result.sides[:1]
    title = "Loss of every step" + ("" if result.loss_difference else ", in both runs")
    names = {side.name: f"  {side.name}" if len(sides) > 1 else "" for side in sides}
    indent = max(map(len, names.values())) + 2
    each = (width - indent) // 7
    lines = [title]
    for start in range(0, result.config.steps, each):
        for side in sides:
            part = " ".join(f"{loss:.4f}" for loss in side.losses[start : start + each])
            lines.append(f"{names[side.name]:{indent}}{part}")
    return _plain(lines)


def next_commands(config: Config) -> list[tuple[str, str]]:
    """What to type next, and what for."""
    program = command()
    found = [
        (f"{program} run your_script.py", "your own program under the overlay, as it is; torchrun works there, too")
    ]
    axes = [(config.dp_replicate, "R"), (config.dp_shard, "S0"), (config.tp, "S0")]
    large = [(str(size), placement) for size, placement in axes if size > 1]
    if large:
        mesh, source = map(",".join, zip(*large))
        target = ",".join("R" for _ in large)
        explain = f"{program} explain --mesh {mesh} --shape 64,64 {source} {target}"
        found.insert(0, (explain, "how such a weight is made whole by stock and by the overlay, step by step"))
    again = (f"{program} demo --flatten", "this again, with a group over just the axes that cut a weight")
    return [again, *found] if config.lacks_groups else found


def command() -> str:
    """How this program is called here: by name if it is on PATH, else by its path, else by its Python."""
    if shutil.which("torch-overlay"):
        return "torch-overlay"
    beside = os.path.join(os.path.dirname(sys.executable), "torch-overlay")
    if os.path.exists(beside):
        return min(beside, os.path.relpath(beside), key=len)
    return f"{min(sys.executable, os.path.relpath(sys.executable), key=len)} -m torch_overlay"


def _plain(lines: list[str]) -> list[Styled]:
    return [(line, "") for line in lines]
