"""Why a step is there, in one sentence: of the overlay's plans, and of torch's. Standard library only."""

from __future__ import annotations

from ..distributed.tensor._planner.regions import Regions
from ..distributed.tensor._planner.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Divide,
    Embed,
    Narrow,
    ReduceScatter,
    Step,
)
from .words import joined

_ENDED = {"sum": "sum", "avg": "average", "max": "maximum", "min": "minimum"}


def ours(step: Step, averages: bool) -> str:
    """Why the overlay's plan has this step; `averages`: whether a division ends an average or splits a value."""
    if isinstance(step, Narrow):
        return "local: each rank holds what it wants and keeps that"
    if isinstance(step, Embed):
        return "local: a shard becomes a term of a sum, with zeros around it"
    if isinstance(step, Divide):
        return f"local: divide by {step.by}, " + ("the terms of the average" if averages else "the parts of each value")
    if isinstance(step, AllGather):
        return "each rank holds a part of what all of them want"
    if isinstance(step, AllReduce):
        return f"ends the {_ended(step.op)}: all ranks get the result"
    if isinstance(step, ReduceScatter):
        return f"ends the {_ended(step.op)}: each rank gets only its own part"
    return "each rank gets all terms of its own part" if getattr(step, "op", None) else "each rank gets what it lacks"


def torchs(step: Step, names: tuple[str, ...], target: Regions) -> str:
    """What one of torch's steps does, and what it costs beyond need, if it does."""
    if isinstance(step, Divide):
        return f"local: divide by {step.by}"
    if not isinstance(step, Collective):
        return _cut(step, names)
    merged = "merged: " if len(step.axes) > 1 else ""
    if isinstance(step, AllReduce):
        unused = any(axis in target.sharded for axis in step.axes)
        return merged + f"ends the {_ended(step.op)}" + (", to be cut later" if unused else "")
    if isinstance(step, ReduceScatter):
        return merged + f"ends the {_ended(step.op)}, cut into {_dims(step.before, step.after)}"
    if isinstance(step, AllToAll):
        over = joined([names[axis] for axis in step.axes])
        return f"{over} cuts {_dims(step.before, step.after)} instead of {_dims(step.after, step.before)}"
    text = merged + f"gathers {_dims(step.after, step.before)}"
    again = [names[axis] for axis in step.axes if axis in target.sharded]
    return text + (f", to be cut over {joined(again)} again later" if again else "")


def _cut(step: Step, names: tuple[str, ...]) -> str:
    if isinstance(step, Embed):
        return "local: a shard becomes a term of a sum, with zeros around it"
    assert isinstance(step, Narrow), step
    axes = sorted(step.after.sharded - step.before.sharded)
    if not axes:
        return "local: each value becomes a term"
    return f"local: {joined([names[axis] for axis in axes])} cuts {_dims(step.before, step.after)}"


def _dims(without: Regions, with_: Regions) -> str:
    """The dims that more axes cut in the second than in the first."""
    dims = [dim for dim, (old, new) in enumerate(zip(without.orders, with_.orders)) if set(new) - set(old)]
    return f"dim {joined([str(dim) for dim in dims])}" if dims else "nothing"


def _ended(op: str) -> str:
    return _ENDED.get(op, op)
