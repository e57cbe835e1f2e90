"""Before a line is read with the names of a mesh."""

from __future__ import annotations

from collections.abc import Sequence

from .cost import arriving
from .regions import Regions
from .steps import Collective, Divide, Step


def line(source: Regions, target: Regions, steps: Sequence[Step], itemsize: int) -> str:
    """A plan as one line: the specs, and each step with its axes and the bytes that it brings to a rank at most.

    Axes are called a, b, c as they come.
    """
    words = ", ".join(_words(step, itemsize) for step in steps)
    return f"{source} → {target}: {words or 'nothing to do'}"


def _words(step: Step, itemsize: int) -> str:
    name = NAMES[type(step)]
    if isinstance(step, Divide):
        return f"{name} by {step.by}"
    if not isinstance(step, Collective):
        return name
    axes = ",".join(chr(ord("a") + a) for a in step.axes)
    op = getattr(step, "op", None)
    label = "" if op in (None, "sum") and not getattr(step, "reduced", ()) else f" {op}"
    rounds = getattr(step, "rounds", 1)
    several = f" in {rounds} rounds" if rounds > 1 else ""
    return f"{name}({axes}){label} {arriving(step) * itemsize} B{several}"
