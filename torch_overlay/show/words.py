"""Numbers, amounts and lists as people read them. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence


def amount(count: int) -> str:
    """Bytes: exact up to 9999 and where a power of 1024 divides them, else to two digits.

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


def duration(seconds: float) -> str:
    """A time to two digits.

    >>> duration(0.000451), duration(2.54)
    ('450 us', '2.5 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{two_digits(seconds * factor)} {unit}"
    return f"{two_digits(seconds * 1e6)} us"


def two_digits(value: float) -> str:
    """An estimate, with the digits that mean something.

    >>> two_digits(0.194), two_digits(1.0), two_digits(1234.5)
    ('0.19', '1', '1200')
    """
    return f"{float(f'{value:.2g}'):.10g}"


def counted(count: int, noun: str) -> str:
    """`2 collectives`, `1 collective`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def joined(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
