"""An explanation: two plans for one redistribution, step by step, as a value that prints as a table.

Bytes are those of the busiest rank: what it gets from others, and what it sends to them. Times are estimates of the
cost model, the same for both plans. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..distributed._rank_map import short
from ..distributed.tensor._planner.regions import Regions
from ..distributed.tensor._planner.steps import Step
from .columns import aligned, wrapped
from .question import Question
from .words import amount, counted, duration, two_digits

Number = TypeVar("Number", int, float)

_HEADS = ("", "step", "over", "ranks", "then holds", "in", "out", "time")
_RIGHT = (0, 3, 5, 6, 7)  # columns of numbers
_UNDER = " " * 5  # where a step's name begins


@dataclass(frozen=True)
class Line:
    """One step in words.

    Attributes:
        name: of the step; its reduction in brackets.
        axes: the names of the axes over which it communicates; none for a local step.
        ranks: in the group.
        holds: the placements after it.
        incoming: bytes that the busiest rank gets from others; None if that isn't known.
        outgoing: bytes that the busiest rank sends to others; None if that isn't known.
        seconds: the estimate.
        why: one sentence.
        trouble: what goes wrong here, or nothing.
    """

    name: str
    axes: tuple[str, ...]
    ranks: int
    holds: str
    incoming: int | None
    outgoing: int | None
    seconds: float | None
    why: str
    trouble: str = ""

    def cells(self, number: int) -> tuple[str, ...]:
        """The step as a row of the table."""
        if not self.axes:
            return (f"  {number}", self.name, "", "", self.holds, "", "", "")
        over, ranks = ",".join(self.axes), str(self.ranks)
        return (f"  {number}", self.name, over, ranks, self.holds, *_figures(self))

    def below(self) -> list[str]:
        """What stands under the row: why the step is there, and what goes wrong."""
        trouble = wrapped(f"!! {self.trouble}", _UNDER) if self.trouble else []
        return wrapped(self.why, _UNDER) + trouble


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
    def incoming(self) -> int | None:
        """The bytes that the busiest rank of each step gets, in all steps; None if one isn't known."""
        return _sum(line.incoming for line in self.lines)

    @property
    def outgoing(self) -> int | None:
        """The bytes that the busiest rank of each step sends, in all steps; None if one isn't known."""
        return _sum(line.outgoing for line in self.lines)

    @property
    def seconds(self) -> float | None:
        """The estimate for all steps; None if one isn't known."""
        return _sum(line.seconds for line in self.lines)

    def rows(self) -> list[tuple[str, ...]]:
        """The plan as rows of the table, its sum last."""
        if not self.lines:
            return []
        rows = [line.cells(number) for number, line in enumerate(self.lines, 1)]
        return [*rows, ("", "total", "", "", "", *_figures(self))]

    def text(self, rows: list[str]) -> list[str]:
        """The plan as lines, from its aligned rows."""
        if not self.lines:
            return [f"{self.name}: nothing to do"] if not self.note else [self.name, *wrapped(self.note, _UNDER)]
        found = [f"{self.name}: {counted(self.collectives, 'collective')}"]
        for row, line in zip(rows, self.lines):
            found += [row, *line.below()]
        return [*found, rows[-1], *wrapped(self.note, _UNDER)]


@dataclass(frozen=True)
class Explanation:
    """Torch's plan and the overlay's for one redistribution. Print it."""

    question: Question
    torch: Side
    overlay: Side

    def __str__(self) -> str:
        sides = (self.torch, self.overlay)
        heads, *table = aligned([_HEADS, *self.torch.rows(), *self.overlay.rows()], _RIGHT)
        parts, at = [*self.title(), "", *([heads] if table else [])], 0
        for side in sides:
            count = len(side.rows())
            parts += side.text(table[at : at + count])
            at += count
        return "\n".join([*parts, "", *self.summary()]).rstrip()

    __repr__ = __str__

    def title(self) -> list[str]:
        """What is asked."""
        ask = self.question
        mesh = " x ".join(f"{name}={size}" for name, size in zip(ask.names, ask.sizes)) or "no axes"
        shape = "x".join(map(str, ask.shape)) or "scalar"
        order = "" if list(ask.ranks) == list(range(len(ask.ranks))) else f" in the order {short(ask.ranks)}"
        return [
            *wrapped(f"{shape} {ask.dtype} on {mesh}, {counted(math.prod(ask.sizes), 'rank')}{order}"),
            f"  from {ask.words[0]}{self._held(ask.source)}",
            f"  to   {ask.words[1]}{self._held(ask.target)}",
        ]

    def _held(self, regions: Regions | None) -> str:
        if regions is None:
            return ""
        size = amount(regions.most * self.question.itemsize)
        return f": {size} a rank" + (", a term of the value" if regions.pending else "")

    def summary(self) -> list[str]:
        """How the plans compare, and what the numbers assume and leave out."""
        lines = []
        if self.torch.lines and self.overlay.lines:
            lines += wrapped(
                f"collectives {self.torch.collectives} -> {self.overlay.collectives}, "
                f"bytes in {_change(self.torch.incoming, self.overlay.incoming)}, "
                f"out {_change(self.torch.outgoing, self.overlay.outgoing)}, "
                f"time {_change(self.torch.seconds, self.overlay.seconds)}"
            )
        if self.torch.lines or self.overlay.lines:
            lines += self._assumed()
        if any("#" in line.holds for line in (*self.torch.lines, *self.overlay.lines)):
            lines += wrapped("S0#1: cuts dim 0 too, as the second of its axes instead of in the order of the axes")
        return lines

    def _assumed(self) -> list[str]:
        cost = self.question.cost
        pair = f"{duration(cost.latency)} for 2 ranks and more for more"
        guess = f"assumed: {pair}, {cost.bandwidth / 1e9:g} GB/s, for want of a topology"
        return [
            "in, out: bytes that the busiest rank gets from others and sends to others",
            "time: an estimate, latency + the larger of in and out / bandwidth",
            f"      (x {cost.exchange:g} in an all_to_all)",
            *([] if cost.axes else [guess]),
            "left out: contention, overlap with compute, copies to pack and unpack",
        ]


def _figures(of: Line | Side) -> tuple[str, str, str]:
    into, out = ("?" if size is None else amount(size) for size in (of.incoming, of.outgoing))
    return (into, out, "?" if of.seconds is None else duration(of.seconds))


def _sum(parts: Iterable[Number | None]) -> Number | None:
    total: Any = 0
    for part in parts:
        if part is None:
            return None
        total += part
    return total


def _change(old: float | None, new: float | None) -> str:
    if old is None or new is None:
        return "unknown"
    return f"x {two_digits(new / old)}" if old else "none" if not new else "more"
