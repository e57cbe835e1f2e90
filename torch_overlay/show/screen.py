"""Prints text for people, as wide as the terminal allows.

On a terminal, and with rich installed, the text has colours, and a bar shows progress. The text itself is the same
without them.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

NARROW, WIDE = 80, 120  # columns. Every table can be printed in the first, and none is wider than the second

# rich's style for each kind of line.
STYLES = {"title": "bold", "head": "bold", "side": "bold cyan", "why": "dim", "trouble": "bold red", "good": "green"}
# The colours of groups, by their number.
COLORS = ("cyan", "yellow", "magenta", "green", "bright_blue", "bright_red", "bright_black", "white", "blue", "red")

Colored = tuple[int, int, str]  # from column, to column, style


class Styled(str):
    """A line of text with the style of the line and of parts of it, for terminals with colours.

    Args:
        style: a key of `STYLES`, or a style of rich itself. Not checked here.
        parts: columns of the line with another style: from, up to but without, style.
    """

    style: str
    parts: Sequence[Colored]

    def __new__(cls, text: str, style: str = "", parts: Sequence[Colored] = ()) -> Styled:
        """Make the line. It equals the plain text."""
        line = super().__new__(cls, text)
        line.style, line.parts = STYLES.get(style, style), parts
        return line


def styled(lines: Iterable[str], style: str) -> list[str]:
    return [Styled(line, style) for line in lines]


def headed(table: list[str]) -> list[str]:
    """The lines of a table, the first in the style of a head."""
    return [*styled(table[:1], "head"), *table[1:]]


class Shown:
    """Base of values that print as text, as wide as there is room, and can be drawn."""

    def lines(self, width: int = NARROW) -> list[str]:
        """The text for a terminal of this many columns."""
        raise NotImplementedError

    def save(self, path: str) -> None:
        """Write a picture."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(self.lines()).rstrip()

    __repr__ = __str__


def width() -> int:
    """How many columns to print in: those of the terminal, within limits; in a pipe the fewest or COLUMNS."""
    # In a pipe the width must not depend on the terminal behind it: logs are compared, and pages quote them.
    if "COLUMNS" not in os.environ and not sys.stdout.isatty():
        return NARROW
    return min(WIDE, max(NARROW, shutil.get_terminal_size((NARROW, 24)).columns))


def show(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Print the lines, in their styles on a terminal."""
    file = sys.stdout if file is None else file
    _print(lines, file, console(file))


def _print(lines: Iterable[str], file: TextIO, on: Any) -> None:
    """Print lines to a file, or in their styles on rich's console."""
    for line in lines:
        if on is None:
            print(line, file=file)
        else:
            on.print(_text(line), soft_wrap=True)


def console(file: TextIO) -> Any:
    """rich's console, if the file is a terminal that can move its cursor and rich is installed; else None."""
    if not file.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    # Without markup: axes are printed in brackets, which rich would read as styles.
    terminal = Console(file=file, highlight=False, markup=False)
    return None if terminal.is_dumb_terminal else terminal


def _text(line: str) -> Any:
    """A line as rich's text, with the styles of its parts."""
    from rich.text import Text

    text = Text(str(line), style=getattr(line, "style", ""))
    for start, end, style in getattr(line, "parts", ()):
        text.stylize(style, start, end)
    return text


class Screen:
    """Prints lines, and shows progress: by a bar on a terminal, by lines without rich or in a pipe."""

    def __init__(self) -> None:
        self._console = console(sys.stdout)
        self._bar: Any = None
        self._task: Any = None
        self._begun = time.perf_counter()
        self.width = max(60, min(WIDE, shutil.get_terminal_size().columns))

    def say(self, *lines: str) -> None:
        _print(lines, sys.stdout, self._console)
        sys.stdout.flush()

    @contextmanager
    def progress(self, total: int) -> Iterator[None]:
        """Show progress while the block runs. Inside, `now` says what is being done, and `advance` that it is done."""
        if self._console is None:
            yield
            return
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), BarColumn(24), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=self._console, transient=True) as self._bar:
            self._task = self._bar.add_task("", total=total)
            try:
                yield
            finally:
                self._bar = None  # else a later `now` would update a bar that rich has taken away

    def now(self, what: str, line: bool = True) -> None:
        """Show what is being done, beside the bar. Without a bar, print it with the seconds since the start."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)
        elif line:
            self.say(f"{time.perf_counter() - self._begun:5.1f} s  {what}")

    def advance(self, count: int = 1) -> None:
        """Move the bar on by so many steps. Does nothing without a bar."""
        if self._bar is not None:
            self._bar.advance(self._task, count)
