"""The figures that the pages quote: read from docs/figures.json, shown as tables, counted again where that is cheap."""

from __future__ import annotations

import dataclasses
import json
import pathlib

from . import marks

FRONT = ("wrong.random", "calls.torchtitan")  # the README's two
FILE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "figures.json"


@dataclasses.dataclass(frozen=True)
class Figure:
    """One quoted figure: stock's and the overlay's value, or how many times better the overlay is.

    Attributes:
        name: unique; its first word is the subject.
        what: in words, with the conditions.
        command: measures it, below the root of a clone; ``tools/bench.py`` also prints its conditions.
        stock: a count, or text with a unit.
        overlay: the same of the overlay.
        ratio: how many times better, where only that is quoted; two numbers are a range.
        recipe: of `made.recipes`, which counts it again in seconds; empty if only the command can.
        note: what the overlay's value consists of.
    """

    name: str
    what: str
    command: str
    stock: int | str | None = None
    overlay: int | str | None = None
    ratio: float | list[float] | None = None
    recipe: str = ""
    note: str = ""

    @property
    def better(self) -> str:
        """How many times better, "" where that isn't quoted: text has no ratio, and more groups are no gain.

        >>> Figure("x", "", "", stock=1020, overlay=630).better, Figure("y", "", "", ratio=[2.9, 4.8]).better
        ('1.6x', '2.9x to 4.8x')
        """
        if self.ratio is not None:
            return " to ".join(f"{part:g}x" for part in (self.ratio if isinstance(self.ratio, list) else [self.ratio]))
        if not isinstance(self.stock, int) or not isinstance(self.overlay, int):
            return ""
        if not 0 < self.overlay < self.stock:
            return ""
        return f"{_digits(self.stock / self.overlay)}x"


def _digits(ratio: float) -> str:
    """Two digits of a small ratio; all of a large one, which is a count.

    >>> _digits(1.619), _digits(41.8), _digits(8192.0)
    ('1.6', '42', '8,192')
    """
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:,.0f}"


def read() -> dict[str, Figure]:
    """All figures by name, in the order of the file."""
    found = [Figure(**entry) for entry in json.loads(FILE.read_text(encoding="utf-8"))["figures"]]
    assert len({figure.name for figure in found}) == len(found), "a figure's name stands twice in docs/figures.json"
    return {figure.name: figure for figure in found}


def parts() -> dict[str, str]:
    """The tables of figures, by the names of their parts."""
    figures = read()
    front = {name: figures[name] for name in FRONT}
    return {
        "figures": _all(figures),
        "figures-front": _all(front, with_command=False),
        "figures-pairs": _pairs(figures),
        "figures-groups": _groups(figures),
    }


def _all(figures: dict[str, Figure], with_command: bool = True) -> str:
    rows = [[one.what, _said(one.stock), _overlay(one), one.better, f"`{one.command}`"] for one in figures.values()]
    head = ["what", "stock", "overlay", "better", "measured by"]
    return marks.table(head, rows) if with_command else marks.table(head[:3], [row[:3] for row in rows])


def _overlay(figure: Figure) -> str:
    return _said(figure.overlay) + (f" ({figure.note})" if figure.note else "")


def _pairs(figures: dict[str, Figure]) -> str:
    rows = []
    for kind, pairs in (("moves", 702), ("reductions", 999)):
        both = [figures[f"{kind}.{what}"] for what in ("collectives", "elements")]
        rows.append([kind, str(pairs), *(_said(value) for one in both for value in (one.stock, one.overlay))])
    head = ["", "pairs", "stock: collectives", "overlay", "stock: elements", "overlay"]
    return marks.table(head, rows)


def _groups(figures: dict[str, Figure]) -> str:
    rows = []
    for recipe in ("torchtitan", "accelerate", "loop"):
        names, ranks = figures[f"groups.{recipe}"], figures[f"groups.{recipe}.ranks"]
        rows.append([names.what.partition(": ")[2], _said(names.stock), _overlay(names), _overlay(ranks)])
    return marks.table(["meshes", "stock", '`"names"`', '`"ranks"`'], rows)


def _said(value: int | str | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else value
