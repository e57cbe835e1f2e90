"""An explanation: two plans for one redistribution, step by step, as a value that prints as a table.

Bytes are those of the busiest rank: what it gets from others, and what it sends to them. Times are estimates of the
cost model, the same for both plans. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..distributed._mesh.rank_map import short
from ..distributed.tensor._planner.cost import EXCHANGE, Cost
from ..distributed.tensor._planner.forms import shared_plan
from ..distributed.tensor._planner.regions import NotPlanned, Regions
from ..distributed.tensor._planner.steps import Step
from . import screen
from .words import aligned, amount, counted, duration, fitted, folded, sized, two_digits, wrapped

JointAxes = frozenset[tuple[int, ...]] | None  # the sets of axes that have a joint group; None for all of them
Number = TypeVar("Number", int, float)

_HEADS = ("", "step", "over", "ranks", "then holds", "in", "out", "time")
_RIGHT = (0, 3, 5, 6, 7)  # columns of numbers
_UNDER = " " * 5  # where a step's name begins


@dataclass(frozen=True)
class Redistribution:
    """A redistribution to explain.

    Attributes:
        words: the placements before and after, as one reads them.
        shape: of the tensor.
        sizes: of the mesh, by axis.
        source: what each coordinate holds before; None if its shards are no boxes.
        target: and after.
        refused: why the overlay leaves this to torch's own code, if it does.
        names: of the mesh's axes.
        ranks: of the mesh, row-major over its axes.
        dtype: its name.
        itemsize: bytes of an element.
        groups: the sets of axes for which the overlay finds a group; None for all of them.
        cost: how long a collective takes.
        named: whether the mesh itself has these names.
    """

    words: tuple[str, str]
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    source: Regions | None
    target: Regions | None
    refused: str
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    dtype: str
    itemsize: int
    groups: JointAxes
    cost: Cost
    named: bool = True

    @property
    def tensor(self) -> str:
        """Its shape and dtype."""
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}"

    def planned(self, all_groups: bool = False) -> tuple[Step, ...]:
        """The overlay's plan, with the groups at hand or as if there were one for each set of axes.

        Raises:
            NotPlanned: torch's own code has to run.
        """
        if self.refused or self.source is None or self.target is None:
            raise NotPlanned(self.refused or "shards that are no boxes")
        return shared_plan(self.source, self.target, self.itemsize, None if all_groups else self.groups, self.cost)


def groups_at_hand(flatten: str, sizes: tuple[int, ...], flattened: list[tuple[int, ...]]) -> JointAxes:
    """For which sets of axes a new mesh has a group, by `options.flatten`.

    Args:
        flattened: the sets of axes that the user flattened.
    """
    found = {tuple(sorted(axes)) for axes in flattened}
    if flatten == "whole":
        found.add(tuple(axis for axis, size in enumerate(sizes) if size > 1))
    return frozenset(found)


@dataclass(frozen=True)
class ShownStep:
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
        rounds: how many collectives the step is, one after the other.
        step: the same as the planner's value, for pictures; None if it has none.
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
    rounds: int = 1
    step: Step | None = None

    def cells(self, number: int) -> tuple[str, ...]:
        """The step as a row of the table."""
        if not self.axes:
            return (f"  {number}", self.name, "", "", self.holds, "", "", "")
        over, ranks = ",".join(self.axes), str(self.ranks)
        return (f"  {number}", self.name, over, ranks, self.holds, *_figures(self))

    def below(self, width: int) -> list[str]:
        """What stands under the row: why the step is there, and what goes wrong."""
        rounds = (
            f", in {self.rounds} rounds, so that no more is held at once than stock holds" if self.rounds > 1 else ""
        )
        why = screen.styled(wrapped(self.why + rounds, _UNDER, width), "why")
        if self.trouble:
            why += screen.styled(wrapped(f"!! {self.trouble}", _UNDER, width), "trouble")
        return why


@dataclass(frozen=True)
class ShownPlan:
    """One of the two plans.

    Attributes:
        name: whose plan it is.
        lines: its steps in words.
        note: what else to say of it, or nothing.
    """

    name: str
    lines: tuple[ShownStep, ...]
    note: str = ""

    @property
    def collectives(self) -> int:
        """How many there are, each round of a step counted."""
        return sum(line.rounds for line in self.lines if line.axes)

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

    def text(self, rows: list[list[str]], width: int) -> list[str]:
        """The plan as lines, from its rows, each of which may be several lines."""
        if not self.lines:
            found = [f"{self.name}:", *wrapped(self.note, _UNDER, width)] if self.note else []
            return found or screen.styled([f"{self.name}: nothing to do"], "side")
        found = screen.styled([f"{self.name}: {counted(self.collectives, 'collective')}"], "side")
        for row, line in zip(rows, self.lines):
            found += [*row, *line.below(width)]
        return [*found, *screen.styled(rows[-1], "head"), *screen.styled(wrapped(self.note, _UNDER, width), "trouble")]


@dataclass(frozen=True, repr=False)
class Explanation(screen.Shown):
    """Torch's plan and the overlay's for one redistribution. Print it."""

    question: Redistribution
    torch: ShownPlan
    overlay: ShownPlan

    def lines(self, width: int = screen.NARROW) -> list[str]:
        """The explanation for a terminal of this many columns."""
        rows = [self.torch.rows(), self.overlay.rows()]
        heads, *table = folded([_HEADS, *rows[0], *rows[1]], width, {1: "(", 2: ",", 4: "·"}, _RIGHT)
        return [
            *self.title(width),
            "",
            *(screen.styled(heads, "head") if table else []),
            *self.torch.text(table[: len(rows[0])], width),
            *self.overlay.text(table[len(rows[0]) :], width),
            *self.compared(),
            *self.notes(width),
        ]

    def save(self, path: str) -> None:
        """Write a picture of who sends what to whom in both plans; see `Shown.save`."""
        from .pictures import draw_plans

        draw_plans(self, path)

    def title(self, width: int) -> list[str]:
        """What is asked."""
        ask = self.question
        mesh = sized(ask.names, ask.sizes) or "no axes"
        order = "" if list(ask.ranks) == list(range(len(ask.ranks))) else f" in the order {short(ask.ranks)}"
        asked = f"{ask.tensor} on {mesh}, {counted(math.prod(ask.sizes), 'rank')}{order}"
        return [
            *screen.styled(fitted(asked, width), "title"),
            *fitted(f"  from {ask.words[0]}{self._held(ask.source)}", width),
            *fitted(f"  to   {ask.words[1]}{self._held(ask.target)}", width),
        ]

    def _held(self, regions: Regions | None) -> str:
        if regions is None:
            return ""
        size = amount(regions.most * self.question.itemsize)
        return f": {size} a rank" + (", a term of the value" if regions.pending else "")

    def compared(self) -> list[str]:
        """How the plans compare: how many times better the overlay's is."""
        plans = (self.torch, self.overlay)
        if not all(plan.lines for plan in plans):
            return []
        numbers = zip(*[(plan.collectives, plan.incoming, plan.outgoing, plan.seconds) for plan in plans])
        said = zip(*[(str(plan.collectives), *_figures(plan)) for plan in plans])
        names = ("collectives", "bytes in", "bytes out", "time")
        rows = [(name, *pair, better(*number)) for name, pair, number in zip(names, said, numbers)]
        return ["", *screen.headed(aligned([("", "torch", "overlay", "better"), *rows], right=(1, 2, 3)))]

    def notes(self, width: int) -> list[str]:
        """What the numbers assume and leave out."""
        if not (self.torch.lines or self.overlay.lines):
            return []
        cost = self.question.cost
        said = ["better: how many times fewer, or faster"] if self.torch.lines and self.overlay.lines else []
        said += [
            "in, out: bytes that the busiest rank gets from others and sends to others",
            f"time: an estimate, latency + the larger of in and out / bandwidth (x {EXCHANGE:g} in an all_to_all)",
        ]
        speed = f"{duration(cost.latency)} for 2 ranks and more for more, {cost.bandwidth / 1e9:g} GB/s"
        said.append(f"assumed: {speed}")
        said.append("left out: contention, overlap with compute, copies to pack and unpack")
        if any("#" in step.holds for step in (*self.torch.lines, *self.overlay.lines)):
            said.append("S0#1: cuts dim 0 too, as the second of its axes instead of in the order of the axes")
        return ["", *screen.styled([line for text in said for line in fitted(text, width)], "why")]


def _figures(of: ShownStep | ShownPlan) -> tuple[str, str, str]:
    into, out = ("?" if size is None else amount(size) for size in (of.incoming, of.outgoing))
    return (into, out, "?" if of.seconds is None else duration(of.seconds))


def _sum(parts: Iterable[Number | None]) -> Number | None:
    total: Any = 0
    for part in parts:
        if part is None:
            return None
        total += part
    return total


def better(old: float | None, new: float | None) -> str:
    """How many times less the second is.

    >>> better(24, 10), better(8, 10), better(701, 700), better(0, 3), better(3, 0), better(None, 3)
    ('2.4 x', '0.8 x', 'same', 'worse', 'all', '?')
    """
    if old is None or new is None:
        return "?"
    if not (old and new):
        return "same" if old == new else "worse" if new else "all"
    times = two_digits(old / new)
    return "same" if times == "1" else f"{times} x"
