"""Prints a report: both sides in a row and how many times better the overlay is, then the targets, then the notes."""

from __future__ import annotations

from torch_overlay.show.words import aligned

from .report import Report, Target

# Smaller units to show a number in, by the unit that it was measured in: (name, how many make one).
_SCALES = {
    "s": [("s", 1), ("ms", 1e3), ("us", 1e6)],
    "B": [("MB", 1 / 2**20), ("KB", 1 / 2**10), ("B", 1)],
}


def shown(value: float | None, unit: str) -> str:
    """A number as people read it: three digits in the unit in which they stand before the point.

    >>> shown(0.0000421, "s"), shown(45000000, "B"), shown(9, "groups"), shown(None, "s")
    ('42.1 us', '42.9 MB', '9 groups', '-')
    """
    if value is None:
        return "-"
    scales = _SCALES.get(unit, [(unit, 1)])
    name, factor = next((scale for scale in scales if value * scale[1] >= 1), scales[-1])
    number = value * factor
    text = f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"
    return f"{text} {name}".rstrip()


def times(gain: float | None) -> str:
    """A ratio with the digits that mean something: ``0.97x``, ``12.3x``, ``1,250x``."""
    if gain is None:
        return "-"
    return f"{gain:.2f}x" if gain < 10 else f"{gain:.1f}x" if gain < 100 else f"{gain:,.0f}x"


def print_report(report: Report) -> None:
    print(f"\n{report.bench}, torch {report.torch}\n")
    keys = list(dict.fromkeys(key for row in report.rows for key in row.where))
    rows = [(*keys, "measured", "stock", "overlay", "better")]
    for row in report.rows:
        place = [_place(key, row.where.get(key)) for key in keys]
        rows.append((*place, row.name, shown(row.stock, row.unit), shown(row.overlay, row.unit), times(row.gain)))
    right = {*range(len(rows[0]))} - {len(keys)}
    print(*aligned(rows, right), sep="\n")
    if report.targets:
        targets = [(target.name, *_against(target), "met" if target.met else "MISSED") for target in report.targets]
        print("", *aligned([("target", "measured", "wanted", ""), *targets], (1, 2)), sep="\n")
    print("", *(f"- {note}" for note in report.notes), sep="\n")


def _place(key: str, value: object) -> str:
    if key == "bytes" and isinstance(value, int):
        return shown(value, "B")
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _against(target: Target) -> tuple[str, str]:
    if target.gain:
        return times(target.value), f"at least {times(target.bound)}"
    value, bound = (f"{number:.3g}" if number < 1000 else f"{number:,.0f}" for number in (target.value, target.bound))
    return value, f"at most {bound}"
