"""Formats text for people: amounts, lists, columns, lines of limited length. Standard library only."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence

_KEPT = "\N{NO-BREAK SPACE}"  # textwrap breaks no line there


def amount(count: int) -> str:
    """A number of bytes, exact up to 9999 and for multiples of a power of 1024, else rounded to two digits.

    >>> amount(192), amount(16 * 2**20), amount(768 * 2**10), amount(25_000_000)
    ('192 B', '16 MiB', '768 KiB', '24 MiB')
    """
    if count < 10_000:
        return f"{count} B"
    value, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1000:
            break
        value, unit = value / 1024, bigger
    return f"{int(value) if value.is_integer() else two_digits(value)} {unit}"


def size_text(count: int) -> str:
    """A number of bytes with one digit after the point, as what a Transfer sends is printed.

    >>> size_text(1000), size_text(3 << 20), size_text(150_630)
    ('1000 B', '3 MiB', '147.1 KiB')
    """
    value, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{f'{value:.1f}'.removesuffix('.0')} {unit}"


def brief(count: int) -> str:
    """A number of bytes in few characters, for cells of a table.

    >>> brief(1000), brief(3 << 20)
    ('1000', '3M')
    """
    return amount(count).replace(" ", "").removesuffix("iB").removesuffix("B")


def duration(seconds: float) -> str:
    """A time, rounded to two digits.

    >>> duration(0.000451), duration(2.54)
    ('450 us', '2.5 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3)):  # below a millisecond all is said in microseconds
        if seconds * factor >= 1:
            return f"{two_digits(seconds * factor)} {unit}"
    return f"{two_digits(seconds * 1e6)} us"


def two_digits(value: float) -> str:
    """A number, rounded to two digits.

    >>> two_digits(0.194), two_digits(1.0), two_digits(1234.5)
    ('0.19', '1', '1200')
    """
    return f"{float(f'{value:.2g}'):.10g}"


def counted(count: int, noun: str) -> str:
    """A number and what it counts: `2 collectives`, `1 collective`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def joined(parts: Sequence[str]) -> str:
    """Words in a list, at least one: `a`, `a and b`, `a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def sized(names: Iterable[str], sizes: Iterable[int]) -> str:
    """The sizes of a mesh with the names of its axes: `dp=2 x tp=4`."""
    return " x ".join([f"{name}={size}" for name, size in zip(names, sizes)])


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows as lines, in columns two blanks apart, those in `right` aligned to the right.

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
    """As `aligned`, but a row is a list of lines: cells of the columns in `folds` are cut after the separator that it
    gives if the columns together are too wide.

    >>> for lines in folded([("axis", "ranks"), ("a = b = c", "0, 1")], 12, {0: " = "}):
    ...     print(*lines, sep="\\n")
    axis   ranks
    a =    0, 1
    b = c
    """
    limits = [max(map(len, column)) for column in zip(*rows, strict=True)]
    least = {i: max(len(part) for row in rows for part in _parts(row[i], folds[i])) for i in folds}
    # Narrow the widest column by one, as often as the line is too long: columns that fold end up about equally wide.
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
    """The parts of a cell, each with the separator behind it but without the separator's blanks."""
    *first, last = cell.split(separator)
    return [part + separator.rstrip() for part in first] + [last]


def _folded(cell: str, limit: int, separator: str | None) -> list[str]:
    """The lines of a cell, cut after separators so that each is at most `limit` long, if its parts are."""
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
    """A line, broken if it is too long, with two more blanks before the next lines.

    >>> fitted("  options: share_groups", 16)
    ['  options:', '    share_groups']
    """
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return wrapped(line.strip(), indent, width, indent + "  ")


def wrapped(text: str, indent: str = "", width: int = 80, then: str | None = None) -> list[str]:
    """Break a text into lines, but never inside brackets, where code stands.

    >>> wrapped('1 collective with mesh["dp", "tp"]', "  ", width=20)
    ['  1 collective with', '  mesh["dp", "tp"]']
    """
    # A call such as mesh["dp", "tp"].flatten("dp_tp") is there to be copied, so it isn't torn apart.
    unbroken = re.sub(r"\[[^]]*\]", lambda match: match[0].replace(" ", _KEPT), text)
    lines = textwrap.wrap(
        unbroken,
        width,
        initial_indent=indent,
        subsequent_indent=indent if then is None else then,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_KEPT, " ") for line in lines]
