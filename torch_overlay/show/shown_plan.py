"""A redistribution and its plan as they are printed: a table with a row for each step.

Bytes are those that the busiest rank gets from others, and those that it sends to them: an exchange ends when its
slowest rank is done. Times are estimates of the cost model. This file imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..distributed.tensor._planner.boxes import Box
from ..distributed.tensor._planner.cost import Cost
from ..distributed.tensor._planner.regions import NotPlanned, Regions
from ..distributed.tensor._planner.sizes import shared_plan
from ..distributed.tensor._planner.steps import Step
from . import screen
from .words import amount, counted, duration, folded, wrapped

JointAxes = frozenset[tuple[int, ...]] | None  # the sets of axes that have a joint group; None for all of them

_HEADS = ("", "step", "over", "ranks", "then holds", "in", "out", "time")
_RIGHT = (0, 3, 5, 6, 7)  # columns of numbers
_UNDER = " " * 5  # where a step's name begins


class Several(NamedTuple):
    """A side on which ranks hold several boxes; with what a drawing of `Regions` reads. `boxes` gives those of a
    coordinate."""

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    boxes: Callable[[tuple[int, ...]], list[Box]]
    pending: frozenset[int] = frozenset()


Side = Regions | Several


@dataclass(frozen=True)
class Redistribution:
    """A redistribution to explain.

    Attributes:
        words: the placements before and after, as text.
        shape: the global shape of the tensor.
        sizes: the sizes of the mesh's axes.
        source: which part each rank holds before; None if some shard isn't one box.
        target: which part each rank holds after; None if some shard isn't one box.
        refused: why the overlay leaves this to torch's own code; empty if it doesn't.
        names: the names of the mesh's axes.
        ranks: the mesh's ranks, row-major over its axes.
        dtype: its name.
        itemsize: bytes of an element.
        groups: the sets of axes for which there is a group; None if there is one for each set.
        cost: how long a collective takes.
        named: False if the mesh has no names, and `names` are ours.
        sides: what a picture shows before and after; None where nobody knows which part a rank holds.
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
    sides: tuple[Side | None, Side | None] = (None, None)

    @property
    def tensor(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}"

    def planned(self, all_groups: bool = False) -> tuple[Step, ...]:
        if self.refused or self.source is None or self.target is None:
            raise NotPlanned(self.refused or "shards that are no boxes")
        return shared_plan(self.source, self.target, self.itemsize, None if all_groups else self.groups, self.cost)


def groups_at_hand(flatten: str, sizes: tuple[int, ...], flattened: list[tuple[int, ...]]) -> JointAxes:
    """The sets of several axes for which a new mesh has a group, under this value of the option `flatten`."""
    joint = {tuple(sorted(axes)) for axes in flattened}
    # Axes of one rank move nothing, so a plan never asks for a group that has them.
    if flatten == "whole":
        joint.add(tuple(axis for axis, size in enumerate(sizes) if size > 1))
    return frozenset(joint)


class Totals(NamedTuple):
    """What a way to redistribute takes.

    Attributes:
        incoming: the sum over its collectives of the bytes that the busiest rank gets.
        memory: the most bytes that a rank holds beside the source: what a collective reads and writes.
    """

    collectives: int
    incoming: int
    memory: int


@dataclass(frozen=True)
class ShownStep:
    """One step of a plan, as it is printed.

    Attributes:
        name: the collective or local operation, with its reduction in brackets.
        axes: the names of the axes over which it communicates; empty for a local step.
        ranks: how many ranks its group has.
        holds: the placements after it.
        incoming: bytes that the busiest rank gets from others.
        outgoing: bytes that the busiest rank sends to others.
        seconds: the estimated time.
        why: why the plan has this step, in one sentence.
        rounds: how many collectives it takes, one after the other.
        step: the planner's step, for pictures.
    """

    name: str
    axes: tuple[str, ...]
    ranks: int
    holds: str
    incoming: int
    outgoing: int
    seconds: float
    why: str
    rounds: int = 1
    step: Step | None = None

    def cells(self, number: int) -> tuple[str, ...]:
        """Return the cells of this step's row in the table of `ShownPlan.text`, one for each column."""
        if not self.axes:
            return (f"  {number}", self.name, "", "", self.holds, "", "", "")
        over, ranks = ",".join(self.axes), str(self.ranks)
        return (f"  {number}", self.name, over, ranks, self.holds, *_figures(self))

    def below(self, width: int) -> list[str]:
        """The lines below its row, which say why the plan has it."""
        rounds = (
            f", in {self.rounds} rounds, so that no more is held at once than stock holds" if self.rounds > 1 else ""
        )
        return screen.styled(wrapped(self.why + rounds, _UNDER, width), "why")


@dataclass(frozen=True)
class ShownPlan:
    """A plan, as it is printed.

    Attributes:
        lines: its steps.
        note: a remark below the table, such as which group is missing. May be empty.
        memory: see `Totals`.
    """

    lines: tuple[ShownStep, ...]
    note: str = ""
    memory: int = 0

    @property
    def collectives(self) -> int:
        """How many collectives it runs. Each round of a step counts."""
        return sum(line.rounds for line in self.lines if line.axes)

    @property
    def incoming(self) -> int:
        """The sum over the steps of the bytes that the busiest rank gets."""
        return sum(line.incoming for line in self.lines)

    @property
    def outgoing(self) -> int:
        """The sum over the steps of the bytes that the busiest rank sends."""
        return sum(line.outgoing for line in self.lines)

    @property
    def seconds(self) -> float:
        """The estimated time of all steps."""
        return sum(line.seconds for line in self.lines)

    def text(self, width: int) -> list[str]:
        """The plan as a table, one string a line. Without steps, the note, or that there is nothing to do."""
        if not self.lines:
            if self.note:
                return ["torch_overlay:", *wrapped(self.note, _UNDER, width)]
            return screen.styled(["torch_overlay: nothing to do"], "side")
        cells = [_HEADS, *[line.cells(number) for number, line in enumerate(self.lines, 1)]]
        cells.append(("", "total", "", "", "", *_figures(self)))
        heads, *rows, total = folded(cells, width, {1: "(", 2: ",", 4: "·"}, _RIGHT)
        lines = screen.styled(heads, "head")
        lines += screen.styled([f"torch_overlay: {counted(self.collectives, 'collective')}"], "side")
        for row, line in zip(rows, self.lines):
            lines += [*row, *line.below(width)]
        return [*lines, *screen.styled(total, "head"), *screen.styled(wrapped(self.note, _UNDER, width), "trouble")]


def _figures(of: ShownStep | ShownPlan) -> tuple[str, str, str]:
    """The figures of a step or a whole plan as text: bytes in, bytes out, time."""
    return amount(of.incoming), amount(of.outgoing), duration(of.seconds)
