"""Prints a report: both sides in a row and how many times better the overlay is, then the targets, then the notes."""

from __future__ import annotations

import shutil

from rich import box
from rich.console import Console
from rich.table import Table

from .report import Report, Target

# Smaller units to show a number in, by the unit that it was measured in: (name, how many make one).
_SCALES = {
    "s": [("s", 1), ("ms", 1e3), ("us", 1e6)],
    "B": [("MB", 1 / 2**20), ("KB", 1 / 2**10), ("B", 1)],
}


def shown(value: float | None, unit: str) -> str:
    """A number as people read it: three digits in the unit in which they stand before the point.

    >>> shown(0.0000421, "s"), shown(45000000, "B"), shown(9, "groups"), shown(None, "s")
    ('42.1 us', '42.9 MB', '9 groups', '-')
    """
    if value is None:
        return "-"
    scales = _SCALES.get(unit, [(unit, 1)])
    name, factor = next((scale for scale in scales if value * scale[1] >= 1), scales[-1])
    number = value * factor
    text = f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"
    return f"{text} {name}".rstrip()


def times(gain: float | None) -> str:
    """A ratio with the digits that mean something: ``0.97x``, ``12.3x``, ``1,250x``."""
    if gain is None:
        return "-"
    return f"{gain:.2f}x" if gain < 10 else f"{gain:.1f}x" if gain < 100 else f"{gain:,.0f}x"


def print_report(report: Report, console: Console | None = None) -> None:
    """The tables, on standard output unless told otherwise: between 80 and 120 columns wide, as the terminal is."""
    columns = shutil.get_terminal_size().columns
    console = console or Console(width=max(80, min(120, columns)), highlight=False, markup=False)
    console.print(f"\n{report.bench}, torch {report.torch}")
    console.print(_rows(report))
    if report.targets:
        console.print(_targets(report))
    for note in report.notes:
        console.print(f"- {note}", soft_wrap=True)


def _rows(report: Report) -> Table:
    """One line a row; a rule where the place changes."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    keys = list(dict.fromkeys(key for row in report.rows for key in row.where))
    for key in keys:
        table.add_column(key, justify="right")
    table.add_column("measured")
    for column in ("stock", "overlay", "better"):
        table.add_column(column, justify="right", no_wrap=True)
    before = None
    for row in report.rows:
        place = [_place(key, row.where.get(key)) for key in keys]
        if before is not None and place != before:
            table.add_section()
        cells = place if place != before else [""] * len(keys)
        table.add_row(*cells, row.name, shown(row.stock, row.unit), shown(row.overlay, row.unit), times(row.gain))
        before = place
    return table


def _place(key: str, value: object) -> str:
    if key == "bytes" and isinstance(value, int):
        return shown(value, "B")
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _targets(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("target")
    for column in ("measured", "wanted", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for target in report.targets:
        table.add_row(target.name, *_against(target), "met" if target.met else "MISSED")
    return table


def _against(target: Target) -> tuple[str, str]:
    """What was measured and what is wanted."""
    if target.gain:
        return times(target.value), f"at least {times(target.bound)}"
    value, bound = (f"{number:.3g}" if number < 1000 else f"{number:,.0f}" for number in (target.value, target.bound))
    return value, f"at most {bound}"
