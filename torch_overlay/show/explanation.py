"""`Explanation`: the overlay's plan for one redistribution. Print it, or save a picture of it.

This file imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..distributed._mesh.text import ranks_text
from ..distributed.tensor._planner.cost import EXCHANGE
from ..distributed.tensor._planner.regions import Regions
from . import screen
from .shown_plan import Redistribution, ShownPlan, Totals
from .words import aligned, amount, counted, duration, fitted, sized


@dataclass(frozen=True, repr=False)
class Explanation(screen.Shown):
    """The overlay's plan for one redistribution, and what stock takes, None if that isn't known. Print it."""

    question: Redistribution
    plan: ShownPlan
    stock: Totals | None = None

    def lines(self, width: int = screen.NARROW) -> list[str]:
        return [*self.title(width), "", *self.plan.text(width), *self._beside_stock(), *self.notes(width)]

    def _beside_stock(self) -> list[str]:
        """A row for stock, and one for the plan; none if stock does nothing or isn't known."""
        if self.stock is None or not self.stock.collectives:
            return []
        rows = [("stock", self.stock)]
        if self.plan.lines:
            rows.append(("torch_overlay", Totals(self.plan.collectives, self.plan.incoming, self.plan.memory)))
        cells = [(name, str(sums.collectives), amount(sums.incoming), amount(sums.memory)) for name, sums in rows]
        return ["", *screen.headed(aligned([("", "collectives", "in", "memory"), *cells], right=(1, 2, 3)))]

    def save(self, path: str) -> None:
        """Write a picture of who sends what to whom. The ending of `path` chooses the format."""
        from .pictures import draw_plan

        draw_plan(self.question, self.plan, path)

    def title(self, width: int) -> list[str]:
        """The lines that say which redistribution this is."""
        ask = self.question
        mesh = sized(ask.names, ask.sizes) or "no axes"
        order = "" if list(ask.ranks) == list(range(len(ask.ranks))) else f" in the order {ranks_text(ask.ranks)}"
        asked = f"{ask.tensor} on {mesh}, {counted(math.prod(ask.sizes), 'rank')}{order}"
        return [
            *screen.styled(fitted(asked, width), "title"),
            *fitted(f"  from {ask.words[0]}{self._held(ask.source)}", width),
            *fitted(f"  to   {ask.words[1]}{self._held(ask.target)}", width),
        ]

    def _held(self, regions: Regions | None) -> str:
        """How many bytes a rank holds at most, and whether they are a term, as text; empty if that isn't known."""
        if regions is None:
            return ""
        size = amount(regions.most * self.question.itemsize)
        return f": {size} a rank" + (", a term of the value" if regions.pending else "")

    def notes(self, width: int) -> list[str]:
        """The lines that say what the numbers assume and leave out. Empty if the plan has no steps."""
        if not self.plan.lines:
            return []
        cost = self.question.cost
        # The notes name what the estimate leaves out, so that nobody takes it for a measurement.
        said = [
            "in, out: bytes that the busiest rank gets from others and sends to others",
            "memory: the most that a collective reads and writes on a rank, beside the source",
            f"time: an estimate, latency + the larger of in and out / bandwidth (x {EXCHANGE:g} in an all_to_all)",
        ]
        speed = f"{duration(cost.latency)} for 2 ranks and more for more, {cost.bandwidth / 1e9:g} GB/s"
        said.append(f"assumed: {speed}")
        said.append("left out: contention, overlap with compute, copies to pack and unpack")
        # Two axes that cut one dim in another order than the mesh's: only then does the notation need a word.
        if any("#" in step.holds for step in self.plan.lines):
            said.append("S0#1: cuts dim 0 too, as the second of its axes instead of in the order of the axes")
        return ["", *screen.styled([line for text in said for line in fitted(text, width)], "why")]
