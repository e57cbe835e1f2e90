"""The demo's words: what it prints before, while and after it runs. Strings only."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch_overlay.demo.config import Config
from torch_overlay.demo.result import Result, Side
from torch_overlay.show.columns import aligned

Row = tuple[str, str, str, str]


def header(config: Config) -> str:
    """What is about to run."""
    c = config
    return "\n".join(
        [
            f"{c.ranks} gloo ranks, one world, four views of it:",
            f"  data   (batch {c.dp}, tp {c.tp})              loss  (loss {c.dp})",
            f"  dense  (dp_replicate {c.dp_replicate}, fsdp {c.dp_shard}, tp {c.tp})",
            f"  sparse (dp_replicate {c.dp_replicate}, efsdp {c.efsdp}, ep {c.ep})",
            f"{c.layers} layers of width {c.width}, {c.experts} experts ({c.top_k} a token) in every second one; "
            f"{c.steps} steps of {c.tokens_per_step:,} bytes of the standard library",
        ]
    )


def set_up(side: Side) -> str:
    """One line: which torch a run is on, and how long its meshes took."""
    patches = f" with {side.patches} patches" if side.patches else ""
    return f"{side.name}: torch {side.torch}{patches}, meshes built in {1000 * side.build_seconds:.0f} ms"


def progress_header(first: Side, second: Side) -> str:
    titles = (f"{f'{what} {side.name}':>18}" for what in ("loss", "tok/s") for side in (first, second))
    return f"{'step':>9}{''.join(titles)}"


def progress(result: Result) -> str:
    """One line: the last step's losses and the speed so far."""
    done = f"{len(result.first.losses)}/{result.config.steps}"
    losses = "".join(f"{side.losses[-1]:18.6f}" for side in result.sides)
    return f"{done:>9}{losses}{''.join(_speed(side, result.config) for side in result.sides)}"


def summary(result: Result) -> str:
    """The table: a row for each thing measured, both runs side by side, and second over first."""
    first, second = result.sides
    sections = [
        [("", first.name, second.name, f"{second.name} / {first.name}")],
        _group_rows(result),
        _collective_rows(result),
        _training_rows(result),
    ]
    lines = aligned([row for section in sections for row in section], right=(1, 2, 3))
    rule = "-" * max(map(len, lines))
    ends = itertools.accumulate(map(len, sections))
    return "\n".join(line for end, rows in zip(ends, sections) for line in (*lines[end - len(rows) : end], rule))


def _group_rows(result: Result) -> list[Row]:
    rows = [
        _count("groups of several ranks", result, lambda side: side.groups),
        _count("new_group calls a rank", result, lambda side: side.new_group_calls),
        _row("mesh build, ms", result, lambda side: 1000 * side.build_seconds, "{:.1f}"),
    ]
    if result.first.threads is not None:
        rows += [
            _count("threads a process", result, lambda side: side.threads or 0),
            _count("open sockets a process", result, lambda side: side.sockets or 0),
        ]
    return rows


def _collective_rows(result: Result) -> list[Row]:
    first, second = result.sides
    return [
        _count("collectives a step", result, lambda side: side.collectives_per_step),
        *(_kind(kind, result) for kind in sorted(first.collectives | second.collectives)),
        _count(f"collectives, {first.parameters} weights whole", result, lambda side: side.state_collectives),
    ]


def _training_rows(result: Result) -> list[Row]:
    first, second = result.sides
    return [
        _row("tokens a second", result, lambda side: side.tokens_per_second(result.config), "{:.0f}"),
        ("loss, first step", f"{first.losses[0]:.6f}", f"{second.losses[0]:.6f}", ""),
        ("loss, last step", f"{first.losses[-1]:.6f}", f"{second.losses[-1]:.6f}", ""),
        ("loss, largest difference of a step", "", f"{result.loss_difference:.3g}", _verdict(result)),
    ]


def losses(result: Result) -> str:
    """The loss of every step in both runs, ten a row."""
    lines = []
    for start in range(0, result.config.steps, 10):
        for side in result.sides:
            part = " ".join(f"{loss:.4f}" for loss in side.losses[start : start + 10])
            lines.append(f"{f'{start}..' if side is result.first else '':>6} {side.name:>12}  {part}")
    return "\n".join(["loss of every step", *lines])


def _verdict(result: Result) -> str:
    if result.loss_difference == 0:
        return "weights equal" if result.same_weights else "weights differ"
    return ""


def _kind(kind: str, result: Result) -> Row:
    return _count(f"  {kind}", result, lambda side: side.collectives.get(kind, 0))


def _count(label: str, result: Result, value: Callable[[Side], int]) -> Row:
    return _row(label, result, value, "{}")


def _row(label: str, result: Result, value: Callable[[Side], float], form: str) -> Row:
    first, second = (value(side) for side in result.sides)
    ratio = f"{second / first:.2f}x" if first else "-"
    return label, form.format(first), form.format(second), ratio


def _speed(side: Side, config: Config) -> str:
    if not side.step_seconds:
        return f"{'warm-up':>18}"
    return f"{side.tokens_per_second(config):18.0f}"
