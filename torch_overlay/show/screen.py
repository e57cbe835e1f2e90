"""What is printed for people: as wide as the terminal allows, with colours where there are any, else plain text.

The text is the same either way. rich brings the colours, and a bar that moves while something is under way; without it,
and in a pipe, there are none.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

NARROW, WIDE = 80, 120  # columns: every table fits the first, and none is wider than the second

# How each kind of line looks, in rich's words.
STYLES = {"title": "bold", "head": "bold", "side": "bold cyan", "why": "dim", "trouble": "bold red", "good": "green"}
# Of groups, by their number.
COLORS = ("cyan", "yellow", "magenta", "green", "bright_blue", "bright_red", "bright_black", "white", "blue", "red")

Colored = tuple[int, int, str]  # from column, to column, style


class Styled(str):
    """A line of text that knows how it looks where there are colours: as a whole, and parts of it."""

    style: str
    parts: Sequence[Colored]

    def __new__(cls, text: str, style: str = "", parts: Sequence[Colored] = ()) -> Styled:
        made = super().__new__(cls, text)
        made.style, made.parts = STYLES.get(style, style), parts
        return made


def styled(lines: Iterable[str], style: str) -> list[str]:
    """All of these lines in one style."""
    return [Styled(line, style) for line in lines]


def headed(table: list[str]) -> list[str]:
    """A table whose first line is its head."""
    return [*styled(table[:1], "head"), *table[1:]]


class Shown:
    """What prints as text, as wide as there is room, and can be drawn."""

    def lines(self, width: int = NARROW) -> list[str]:
        """The text for a terminal of this many columns."""
        raise NotImplementedError

    def save(self, path: str) -> None:
        """Write a picture.

        Args:
            path: its ending chooses the format.

        Raises:
            ValueError: too many ranks to be seen, or nothing that can be drawn.
            ImportError: no matplotlib (`pip install torch-overlay[plot]`).
        """
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(self.lines()).rstrip()

    __repr__ = __str__


def width() -> int:
    """Columns to print in: the terminal's, within limits; in a pipe the fewest, unless COLUMNS says how many."""
    if "COLUMNS" not in os.environ and not sys.stdout.isatty():
        return NARROW
    return min(WIDE, max(NARROW, shutil.get_terminal_size((NARROW, 24)).columns))


def show(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Print the lines."""
    file = sys.stdout if file is None else file
    _print(lines, file, console(file))


def _print(lines: Iterable[str], file: TextIO, on: Any) -> None:
    for line in lines:
        if on is None:
            print(line, file=file)
        else:
            on.print(_text(line), soft_wrap=True)


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


class Screen:
    """Prints lines, and shows what is under way: by a bar on a terminal, by lines without rich or in a pipe."""

    def __init__(self) -> None:
        self._console = console(sys.stdout)
        self._bar: Any = None
        self._task: Any = None
        self._begun = time.perf_counter()
        self.width = max(60, min(WIDE, shutil.get_terminal_size().columns))

    def say(self, *lines: str) -> None:
        """Print lines at once."""
        _print(lines, sys.stdout, self._console)
        sys.stdout.flush()

    @contextmanager
    def progress(self, total: int) -> Iterator[None]:
        """While the block runs, `now` says what is under way and `advance` how much of `total` is done."""
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
                self._bar = None

    def now(self, what: str, line: bool = True) -> None:
        """Say what is under way: beside the bar, or as a line with the seconds since the start unless `line` is off."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)
        elif line:
            self.say(f"{time.perf_counter() - self._begun:5.1f} s  {what}")

    def advance(self, count: int = 1) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, count)
