"""Where the demo prints: colours and a bar that moves on a terminal, plain lines in a pipe or without rich."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_overlay.show.screen import console

WIDEST, NARROWEST = 120, 60

Styled = tuple[str, str]  # a line and its style, as rich names styles; "" for none


class Screen:
    """Prints lines, and shows what is under way."""

    def __init__(self) -> None:
        self._console = console(sys.stdout)
        self._bar: Any = None
        self._task: Any = None
        self._begun = time.perf_counter()
        columns = shutil.get_terminal_size().columns if self._console is None else self._console.width
        self.width = max(NARROWEST, min(WIDEST, columns))

    def say(self, text: str = "", style: str = "") -> None:
        """Print a line, or several."""
        if self._console is None:
            print(text, flush=True)
            return
        from rich.text import Text

        self._console.print(Text(text, style=style), soft_wrap=True)

    def say_all(self, lines: Iterable[Styled]) -> None:
        for text, style in lines:
            self.say(text, style)

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
        if self._bar is None:
            if line:
                print(f"{time.perf_counter() - self._begun:5.1f} s  {what}", flush=True)
        else:
            self._bar.update(self._task, description=what)

    def advance(self, count: int = 1) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, count)
