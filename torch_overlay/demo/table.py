"""Two ways beside each other: what was measured of each, and how many times better the second is."""

from __future__ import annotations

from collections.abc import Sequence

from torch_overlay.show.words import aligned


def compared(heads: tuple[str, str], rows: Sequence[tuple[str, float | None, float | None, int]]) -> list[str]:
    """Lines of a table.

    Args:
        heads: what the ways are called.
        rows: a label, a number of each way and its decimals; None for what couldn't be measured, which has no row.

    >>> print(*compared(("loop", "Transfer"), [("calls", 900, 1, 0), ("bytes", None, None, 0)]), sep="\\n")
           loop  Transfer  better
    calls   900         1    900x
    """
    cells = [
        (label, f"{first:,.{decimals}f}", f"{second:,.{decimals}f}", times_better(first, second))
        for label, first, second, decimals in rows
        if first is not None and second is not None
    ]
    return aligned([("", *heads, "better"), *cells], right=(1, 2, 3))


def times_better(cost: float, other: float) -> str:
    """How many times less the other costs.

    >>> times_better(33, 11), times_better(44, 42), times_better(48, 48), times_better(36, 39), times_better(600, 3)
    ('3x', '1.05x', 'same', '0.92x', '200x')
    """
    if cost == other:
        return "same"
    if not cost or not other:
        return "-"
    gain = cost / other
    text = f"{gain:.2f}" if gain < 2 else f"{gain:.1f}" if gain < 10 else f"{gain:,.0f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}x"
