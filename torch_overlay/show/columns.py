"""Plain text in columns and in lines of limited length, for tables that people read. Standard library only."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence

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


def folded(
    rows: Sequence[Sequence[str]], width: int, folds: Mapping[int, str], right: Collection[int] = ()
) -> list[list[str]]:
    """As `aligned`, a list of lines for each row: where the columns are too wide together, those in `folds` are made
    narrower, and their cells go on in further lines, cut after these separators.

    >>> for lines in folded([("axis", "ranks"), ("a = b = c", "0, 1")], 12, {0: " = "}):
    ...     print(*lines, sep="\\n")
    axis   ranks
    a =    0, 1
    b = c
    """
    limits = [max(map(len, column)) for column in zip(*rows, strict=True)]
    least = {i: max(len(part) for row in rows for part in _parts(row[i], folds[i])) for i in folds}
    for _ in range(sum(limits) + 2 * (len(limits) - 1) - width):
        wide = max((i for i in folds if limits[i] > least[i]), key=lambda i: limits[i], default=None)
        if wide is None:
            break
        limits[wide] -= 1
    cells = [[_folded(cell, limits[i], folds.get(i)) for i, cell in enumerate(row)] for row in rows]
    flat = [line for row in cells for line in itertools.zip_longest(*row, fillvalue="")]
    lines = iter(aligned(flat, right))
    return [list(itertools.islice(lines, max(map(len, row)))) for row in cells]


def _parts(cell: str, separator: str) -> list[str]:
    """A cell's pieces, each with the separator after it, without its blanks."""
    *first, last = cell.split(separator)
    return [part + separator.rstrip() for part in first] + [last]


def _folded(cell: str, limit: int, separator: str | None) -> list[str]:
    if separator is None or len(cell) <= limit:
        return [cell]
    blank = separator[len(separator.rstrip()) :]
    first, *others = _parts(cell, separator)
    lines = [first]
    for part in others:
        if len(lines[-1]) + len(blank) + len(part) <= limit:
            lines[-1] += blank + part
        else:
            lines.append(part)
    return lines


def fitted(line: str, width: int) -> list[str]:
    """A line, as more lines if it is too long: those after the first are indented a little more.

    >>> fitted("  options: share_groups", 16)
    ['  options:', '    share_groups']
    """
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return wrapped(line.strip(), indent, width, indent + "  ")


def wrapped(text: str, indent: str = "", width: int = WIDTH, then: str | None = None) -> list[str]:
    """The text as lines; what stands in brackets is code and stays in one piece.

    Args:
        indent: of the first line, and of the others unless `then` is theirs.

    >>> wrapped('1 collective with mesh["dp", "tp"]', "  ", width=20)
    ['  1 collective with', '  mesh["dp", "tp"]']
    """
    whole = re.sub(r"\[[^]]*\]", lambda found: found[0].replace(" ", _KEPT), text)
    lines = textwrap.wrap(
        whole,
        width,
        initial_indent=indent,
        subsequent_indent=indent if then is None else then,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_KEPT, " ") for line in lines]
