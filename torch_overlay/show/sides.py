"""Both plans for a question: torch asked, ours made, each put into lines."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ..distributed.tensor._planner.cost import arriving, collectives, leaving
from ..distributed.tensor._planner.plan import NAMES, flatten_call
from ..distributed.tensor._planner.regions import NotPlanned
from ..distributed.tensor._planner.steps import AllToAll, Collective, Divide, Step
from ..distributed.tensor._plans.specs import into_terms, norm_ended, norm_made
from ..versions import running
from . import reasons
from .explanation import Explanation, Line, Side
from .question import Question
from .torch_steps import TorchStep, padded, torch_steps, word_of
from .words import counted


def explained(question: Question, source: Any, target: Any) -> Explanation:
    """Ask both planners.

    Args:
        source: torch's spec before.
        target: torch's spec after.
    """
    question = replace(question, refused=question.refused or _refused(source, target))
    made = norm_made(tuple(source.placements), tuple(target.placements))
    return Explanation(question, _torchs(question, source, target), _ours(question, made))


def _refused(source: Any, target: Any) -> str:
    """What the runner leaves to torch although it could be planned."""
    try:
        norm_ended(tuple(source.placements), tuple(target.placements), tuple(source.mesh.shape))
    except NotPlanned as reason:
        return str(reason)
    return ""


def _torchs(question: Question, source: Any, target: Any) -> Side:
    name = f"torch {running().text}"
    try:
        found = torch_steps(source, target, question.source)
    except Exception as error:  # of any kind: what torch says is the explanation
        return Side(name, (), (), f"torch can't plan this: {type(error).__name__}: {' '.join(str(error).split())}")
    lines = tuple(_torch_line(question, step) for step in found)
    steps = tuple(step.step for step in found if step.step is not None)
    return Side(name, lines, steps if len(steps) == len(found) else ())


def _torch_line(question: Question, found: TorchStep) -> Line:
    axes = tuple(question.names[axis] for axis in found.axes)
    if found.step is None:
        text = f"from {word_of(found.source)} to {word_of(found.target)} over {','.join(axes)}"
        ranks = math.prod(question.sizes[axis] for axis in found.axes)
        return Line("?", axes, ranks, "", None, None, None, text, found.trouble)
    assert question.target is not None, "torch's steps are read only where both ends are boxes"
    why = reasons.torchs(found.step, question.names, question.target)
    sent = padded(found.step) if isinstance(found.step, AllToAll) else None
    return _line(question, found.step, why, found.trouble, sent)


def _ours(question: Question, made: Any) -> Side:
    name = "torch_overlay"
    try:
        steps = question.planned() if made is None else into_terms(question.planned(), made)
        best = question.planned(all_groups=True)
    except NotPlanned as reason:
        return Side(name, (), (), f"leaves this to torch's own code, without merging where that is wrong: {reason}")
    return Side(name, _our_lines(question, steps), steps, _missing(question, steps, best))


def _missing(question: Question, steps: tuple[Step, ...], best: tuple[Step, ...]) -> str:
    """Which calls would make the groups that the plan lacks, and what it would be with them; empty if it lacks none."""
    if collectives(best) >= collectives(steps):
        return ""
    wanted = [step.axes for step in best if isinstance(step, Collective) and len(step.axes) > 1]
    lacked = dict.fromkeys(axes for axes in wanted if axes not in (question.groups or ()))
    calls = " and ".join(flatten_call(axes, question.names if question.named else None) for axes in lacked)
    return f"would be {counted(collectives(best), 'collective')} with {calls}"


def _our_lines(question: Question, steps: tuple[Step, ...]) -> tuple[Line, ...]:
    # An average that ends as a sum is divided after it; what is split into terms of a sum is divided last.
    assert question.source is not None, "a plan has a source"
    averages = "avg" in question.source.partial and any(getattr(step, "op", None) == "sum" for step in steps)
    lines = []
    for step in steps:
        lines.append(_line(question, step, reasons.ours(step, averages)))
        averages = averages and not isinstance(step, Divide)
    return tuple(lines)


def _line(question: Question, step: Step, why: str, trouble: str = "", sent: Collective | None = None) -> Line:
    """A step in words; `sent` is what goes over the wire where that is more."""
    name = NAMES[type(step)]
    op = getattr(step, "op", None)
    name = f"{name}({op})" if op else name
    holds = "" if isinstance(step, Divide) else str(step.after)
    if not isinstance(step, Collective):
        return Line(name, (), 1, holds, 0, 0, 0.0, why, trouble)
    sent = sent or step
    incoming, outgoing = arriving(sent) * question.itemsize, leaving(sent) * question.itemsize
    seconds = question.cost.seconds(sent, question.itemsize)
    axes = tuple(question.names[axis] for axis in step.axes)
    rounds = getattr(step, "rounds", 1)
    return Line(name, axes, step.ranks, holds, incoming, outgoing, seconds, why, trouble, rounds)
