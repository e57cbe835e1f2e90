"""Plain text in columns and in lines of limited length, for tables that people read. Standard library only."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Sequence

WIDTH = 80
_KEPT = "\N{NO-BREAK SPACE}"  # textwrap breaks no line there


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows as lines of equal columns, two blanks apart; the columns in `right` end where their neighbours begin.

    >>> print(*aligned([("axis", "size"), ("data", "16"), ("tp", "8")], right=[1]), sep="\\n")
    axis  size
    data    16
    tp       8
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return lines


def wrapped(text: str, indent: str = "", width: int = WIDTH) -> list[str]:
    """The text as lines; what stands in brackets is code and stays in one piece.

    >>> wrapped('1 collective with mesh["dp", "tp"]', "  ", width=20)
    ['  1 collective with', '  mesh["dp", "tp"]']
    """
    whole = re.sub(r"\[[^]]*\]", lambda found: found[0].replace(" ", _KEPT), text)
    lines = textwrap.wrap(
        whole,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_KEPT, " ") for line in lines]
