"""What is printed for people: as wide as the terminal allows, with colours where there are any, else plain text.

The text is the same either way. rich brings the colours; without it, and in a pipe, there are none.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

NARROW, WIDE = 80, 120  # columns: every table fits the first, and none is wider than the second

# How each kind of line looks, in rich's words.
STYLES = {"title": "bold", "head": "bold", "side": "bold cyan", "why": "dim", "trouble": "bold red", "good": "green"}
# Of groups, by their number.
COLORS = ("cyan", "yellow", "magenta", "green", "bright_blue", "bright_red", "bright_black", "white", "blue", "red")

Part = tuple[int, int, str]  # from column, to column, style


class Styled(str):
    """A line of text that knows how it looks where there are colours: as a whole, and parts of it."""

    style: str
    parts: Sequence[Part]

    def __new__(cls, text: str, style: str = "", parts: Sequence[Part] = ()) -> Styled:
        made = super().__new__(cls, text)
        made.style, made.parts = STYLES.get(style, style), parts
        return made


def styled(lines: Iterable[str], style: str) -> list[str]:
    """All of these lines in one style."""
    return [Styled(line, style) for line in lines]


def width() -> int:
    """Columns to print in: the terminal's, within limits; in a pipe the fewest, unless COLUMNS says how many."""
    if "COLUMNS" not in os.environ and not sys.stdout.isatty():
        return NARROW
    return min(WIDE, max(NARROW, shutil.get_terminal_size((NARROW, 24)).columns))


def show(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Print the lines."""
    file = sys.stdout if file is None else file
    found = console(file)
    for line in lines:
        if found is None:
            print(line, file=file)
        else:
            found.print(_text(line), soft_wrap=True)


def console(file: TextIO) -> Any:
    """rich's console where that is a terminal that can move its cursor and rich is installed, else None."""
    if not file.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    found = Console(file=file, highlight=False, markup=False)
    return None if found.is_dumb_terminal else found


def _text(line: str) -> Any:
    from rich.text import Text

    made = Text(str(line), style=getattr(line, "style", ""))
    for start, end, style in getattr(line, "parts", ()):
        made.stylize(style, start, end)
    return made
