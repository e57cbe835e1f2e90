"""What the commands that show something do with it: print it, and write its picture if that was asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

from ..show import screen


class Shown(Protocol):
    """An explanation or a drawing."""

    def lines(self, width: int) -> list[str]:
        """For a terminal of this many columns."""

    def save(self, path: str) -> None:
        """Write a picture."""


def answer(command: str, make: Callable[[], Shown], out: str | None) -> int:
    """Print what is made, and write its picture there; the exit code, 2 if one of the two can't be done."""
    try:
        shown = make()
        if out:  # first, so that a reader who stops reading still gets it
            shown.save(out)
    except (ValueError, ImportError, OSError) as error:
        print(f"torch_overlay {command}: {error}", file=sys.stderr)
        return 2
    screen.show(shown.lines(screen.width()))
    if out:
        print(f"drawn: {out}")
    return 0
