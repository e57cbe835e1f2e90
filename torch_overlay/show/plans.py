"""Turns the plan of a redistribution into the lines of an `Explanation`: each step with bytes, time and reason."""

from __future__ import annotations

import itertools
from dataclasses import replace

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ..distributed.tensor._planner.boxes import Box
from ..distributed.tensor._planner.cost import arriving, collectives, leaving
from ..distributed.tensor._planner.regions import NotPlanned, Regions
from ..distributed.tensor._planner.search import NAMES, flatten_call
from ..distributed.tensor._planner.steps import (
    AllGather,
    AllReduce,
    Collective,
    Divide,
    Embed,
    Narrow,
    ReduceScatter,
    Step,
)
from ..distributed.tensor._runner.specs import into_terms, norm_ended, norm_made, read_cuts
from ..transfers.pieces import runs_at, strided_cuts
from . import stock, typed
from .explanation import Explanation
from .shown_plan import JointAxes, Redistribution, Several, ShownPlan, ShownStep, Side
from .words import counted


def explained(question: Redistribution, source: DTensorSpec, target: DTensorSpec, flattened: JointAxes) -> Explanation:
    """Explain the plan beside what stock does with these `flattened` axes; without a plan, the note says why."""
    try:
        by_stock = stock.totals(source, target, flattened)
    except Exception:  # of any kind: torch refuses it, or has another planner on this release
        by_stock = None
    question = replace(question, sides=(_side(source), _side(target)))
    return Explanation(question, _plan(question, tuple(source.placements), tuple(target.placements)), by_stock)


def _side(spec: DTensorSpec) -> Side | None:
    """Which boxes a picture shows of a tensor; None if they can't be read, or in two ways."""
    shape, sizes = tuple(spec.shape), tuple(spec.mesh.shape)
    try:
        strided = strided_cuts(spec, "a tensor")
        if strided is None:
            cuts = read_cuts(spec.placements, spec.shard_order, len(shape), sizes)
            is_strided = _StridedShard in map(type, spec.placements)
            return cuts.on(shape, sizes) if is_strided else Regions(shape, sizes, cuts.orders, cuts.partial)
    except (NotPlanned, ValueError):
        return None
    orders = tuple([tuple([cut.coordinate for cut in strided if cut.dim == dim]) for dim in range(len(shape))])

    def boxes(coordinate: tuple[int, ...]) -> list[Box]:
        runs = itertools.product(*runs_at(strided, shape, coordinate))
        return [Box(tuple([run.offset for run in box]), tuple([run.length for run in box])) for box in runs]

    return Several(shape, sizes, orders, boxes)


def _plan(question: Redistribution, source: tuple[Placement, ...], target: tuple[Placement, ...]) -> ShownPlan:
    try:
        norm_ended(source, target, question.sizes)
    except NotPlanned as reason:
        # The planner, which knows regions and reductions, would plan this. The runner leaves it to torch.
        question = replace(question, refused=question.refused or str(reason))
    new_norm = norm_made(source, target)
    try:
        steps = question.planned() if new_norm is None else into_terms(question.planned(), new_norm)
        best = question.planned(all_groups=True)  # what the plan would be with a group for every set of axes
    except NotPlanned as reason:
        note = f"leaves this to torch's own code, without merging where that is wrong: {reason}"
        return ShownPlan((), note)
    return ShownPlan(_lines(question, steps), _missing_groups(question, steps, best), _memory(question, steps))


def _memory(question: Redistribution, steps: tuple[Step, ...]) -> int:
    """The most bytes that a rank holds beside the source."""
    most = own = 0
    for step in steps:
        if isinstance(step, (Collective, Embed)):
            most, own = max(most, own + step.after.most), step.after.most
    return most * question.itemsize


def _missing_groups(question: Redistribution, steps: tuple[Step, ...], best: tuple[Step, ...]) -> str:
    """A note that names the mesh calls which would save collectives, and how many would be left; empty if none is."""
    if collectives(best) >= collectives(steps):
        return ""
    joint = [step.axes for step in best if isinstance(step, Collective) and len(step.axes) > 1]
    missing = dict.fromkeys(axes for axes in joint if axes not in (question.groups or ()))
    calls = " and ".join(flatten_call(axes, question.names if question.named else None) for axes in missing)
    return f"would be {counted(collectives(best), 'collective')} with {calls}"


def _lines(question: Redistribution, steps: tuple[Step, ...]) -> tuple[ShownStep, ...]:
    """Each step of a plan with its reason. The question must have a source."""
    # A division may stand for two things. An average that is reduced as a sum is divided after that sum, so the first
    # one ends it. A value that is split into the terms of a new sum is divided last.
    assert question.source is not None, "a plan has a source"
    averages = "avg" in question.source.partial and any(getattr(step, "op", None) == "sum" for step in steps)
    lines = []
    for step in steps:
        lines.append(_line(question, step, _why(step, averages)))
        averages = averages and not isinstance(step, Divide)
    return tuple(lines)


def _line(question: Redistribution, step: Step, why: str) -> ShownStep:
    """One step as it is printed: its bytes and time are 0 if it is local."""
    op = getattr(step, "op", None)
    name = NAMES[type(step)] + (f"({op})" if op else "")
    holds = "" if isinstance(step, Divide) else str(step.after)
    # A local step moves nothing between ranks, and the cost model gives it no time.
    if not isinstance(step, Collective):
        return ShownStep(name, (), 1, holds, 0, 0, 0.0, why, step=step)
    incoming, outgoing = arriving(step) * question.itemsize, leaving(step) * question.itemsize
    seconds = question.cost.seconds(step, question.itemsize)
    axes = tuple(question.names[axis] for axis in step.axes)
    rounds = getattr(step, "rounds", 1)
    return ShownStep(name, axes, step.ranks, holds, incoming, outgoing, seconds, why, rounds, step)


_ENDED = {"sum": "sum", "avg": "average", "max": "maximum", "min": "minimum"}


def _why(step: Step, averages: bool) -> str:
    if isinstance(step, Narrow):
        return "local: each rank holds what it wants and keeps that"
    if isinstance(step, Embed):
        return "local: a shard becomes a term of a sum, with zeros around it"
    if isinstance(step, Divide):
        return f"local: divide by {step.by}, " + ("the terms of the average" if averages else "the parts of each value")
    if isinstance(step, AllGather):
        return "each rank holds a part of what all of them want"
    if isinstance(step, AllReduce):
        return f"ends the {_ENDED.get(step.op, step.op)}: all ranks get the result"
    if isinstance(step, ReduceScatter):
        return f"ends the {_ENDED.get(step.op, step.op)}: each rank gets only its own part"
    return "each rank gets all terms of its own part" if getattr(step, "op", None) else "each rank gets what it lacks"


def to_torch_placement(placement: typed.Placement) -> Placement:
    if isinstance(placement, typed.Shard):
        return Shard(placement.dim)
    if isinstance(placement, typed.StridedShard):
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return Partial(placement.op) if isinstance(placement, typed.Partial) else Replicate()


def word_of(placement: Placement) -> str:
    """A placement as it is typed: `R`, `S0`, `P`, `P(max)`, `_S0(2)`."""
    if isinstance(placement, _StridedShard):
        return f"_S{placement.dim}({placement.split_factor})"
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return "R" if isinstance(placement, Replicate) else str(placement)
