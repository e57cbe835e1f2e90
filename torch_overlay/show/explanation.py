"""An explanation: two plans for one redistribution, step by step, as a value that prints as a table.

Bytes are what arrives at the busiest rank from others. Times are estimates of the cost model, the same for both plans.
Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..distributed.tensor._planner.regions import Regions
from ..distributed.tensor._planner.steps import Step
from .question import Question
from .words import amount, counted, duration

_HEADS = ("", "step", "over", "ranks", "then holds", "bytes in", "time", "why")
_RIGHT = (0, 3, 5, 6)  # columns of numbers
_GAP = "  "


@dataclass(frozen=True)
class Line:
    """One step in words.

    Attributes:
        name: of the step; its reduction in brackets.
        axes: the names of the axes over which it communicates; none for a local step.
        ranks: in the group.
        holds: the placements after it.
        bytes: that arrive at the busiest rank; None if that isn't known.
        seconds: the estimate.
        why: one sentence.
        trouble: what goes wrong here, or nothing.
    """

    name: str
    axes: tuple[str, ...]
    ranks: int
    holds: str
    bytes: int | None
    seconds: float | None
    why: str
    trouble: str = ""

    def cells(self, number: int) -> tuple[str, ...]:
        """The step as a row of the table."""
        local = not self.axes
        over, ranks = ("", "") if local else (",".join(self.axes), str(self.ranks))
        size = "" if local else "?" if self.bytes is None else amount(self.bytes)
        time = "" if local else "?" if self.seconds is None else duration(self.seconds)
        return (str(number), self.name, over, ranks, self.holds, size, time, self.why)


@dataclass(frozen=True)
class Side:
    """One of the two plans.

    Attributes:
        name: whose plan it is.
        lines: its steps in words.
        steps: the same as the planner's values, for pictures; empty if there are none.
        note: what else to say of it, or nothing.
    """

    name: str
    lines: tuple[Line, ...]
    steps: tuple[Step, ...] = ()
    note: str = ""

    @property
    def collectives(self) -> int:
        """How many steps communicate."""
        return sum(bool(line.axes) for line in self.lines)

    @property
    def bytes(self) -> int | None:
        """What arrives at the busiest rank in all steps; None if one isn't known."""
        known = [line.bytes for line in self.lines if line.bytes is not None]
        return sum(known) if len(known) == len(self.lines) else None

    @property
    def seconds(self) -> float | None:
        """The estimate for all steps; None if one isn't known."""
        known = [line.seconds for line in self.lines if line.seconds is not None]
        return sum(known) if len(known) == len(self.lines) else None

    def rows(self) -> list[tuple[str, ...]]:
        """The plan as rows of the table, its sum last."""
        if not self.lines:
            return []
        size = "?" if self.bytes is None else amount(self.bytes)
        time = "?" if self.seconds is None else duration(self.seconds)
        total = ("", "total", "", "", "", size, time, counted(self.collectives, "collective"))
        return [*(line.cells(number) for number, line in enumerate(self.lines, 1)), total]


@dataclass(frozen=True)
class Explanation:
    """Torch's plan and the overlay's for one redistribution. Print it."""

    question: Question
    torch: Side
    overlay: Side

    def __str__(self) -> str:
        sides = (self.torch, self.overlay)
        table = _aligned([_HEADS, *self.torch.rows(), *self.overlay.rows()])
        parts, at = [self.title(), "", table[0]], 1
        for side in sides:
            rows = table[at : at + len(side.rows())]
            at += len(rows)
            parts += [side.name + ("" if rows or side.note else ": nothing to do"), *rows]
            parts += [f"  !! {line.trouble}" for line in side.lines if line.trouble]
            parts += [f"   {side.note}"] if side.note else []
        return "\n".join([*parts, "", *self.summary()])

    __repr__ = __str__

    def title(self) -> str:
        """What is asked, in three lines."""
        ask = self.question
        mesh = " x ".join(f"{name}={size}" for name, size in zip(ask.names, ask.sizes)) or "no axes"
        shape = "x".join(map(str, ask.shape)) or "scalar"
        order = "" if list(ask.ranks) == list(range(len(ask.ranks))) else f" in the order {_some(ask.ranks)}"
        return (
            f"{shape} {ask.dtype} on {mesh}, {counted(math.prod(ask.sizes), 'rank')}{order}\n"
            f"  from {ask.words[0]}{self._held(ask.source)}\n"
            f"  to   {ask.words[1]}{self._held(ask.target)}"
        )

    def _held(self, regions: Regions | None) -> str:
        if regions is None:
            return ""
        size = amount(regions.most * self.question.itemsize)
        return f": {size} a rank" + (", a term of the value" if regions.pending else "")

    def summary(self) -> list[str]:
        """How the plans compare, and what the numbers assume."""
        lines = []
        if self.torch.lines and self.overlay.lines:
            lines.append(
                f"collectives {self.torch.collectives} -> {self.overlay.collectives}, "
                f"bytes {_change(self.torch.bytes, self.overlay.bytes)}, "
                f"time {_change(self.torch.seconds, self.overlay.seconds)}"
            )
        cost = self.question.cost
        assumed = f"{duration(cost.latency)} + bytes / {cost.bandwidth / 1e9:g} GB/s"
        assumed = "by the topology that you gave" if cost.axes else f"{assumed} a collective (a topology says better)"
        lines.append(f"bytes in: what the busiest rank gets from others; time: an estimate, {assumed}")
        if any("#" in line.holds for line in (*self.torch.lines, *self.overlay.lines)):
            lines.append("S0#1: cuts dim 0 too, as the second of its axes instead of in the order of the axes")
        return lines


def _change(old: float | None, new: float | None) -> str:
    if old is None or new is None:
        return "unknown"
    return f"x {new / old:.2f}" if old else "none" if not new else "more"


def _some(ranks: tuple[int, ...]) -> str:
    return " ".join(map(str, ranks[:16])) + (" ..." if len(ranks) > 16 else "")


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines of equal columns; the last column is as long as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    widths[0] += 2
    lines = []
    for row in rows:
        cells = [cell.rjust(w) if i in _RIGHT else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append(_GAP.join(cells).rstrip())
    return lines
