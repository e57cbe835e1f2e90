"""Answers to questions, each made once and remembered: a program, or why the
step-by-step path runs.

They live in the shared state of the mesh's universe and go with its meshes.

What the plan of a redistribution costs, for sharding propagation, which asks the same
over and over.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.symbolic_shapes import guard_or_false

from ..._mesh.state import Remembered, shared_state, states
from .._planner.cost import collectives
from .._planner.regions import NotPlanned
from .._planner.search import flatten_call
from .._planner.sizes import guards, shared_plan
from .._planner.steps import Collective
from .program import Program, make_program, tell
from .question import SYMBOLIC, Question, is_symbolic, why_not
from .specs import pads_step_by_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh


CACHED = 4096  # answers of one universe


class Fallback(NamedTuple):
    """The answer where the step-by-step path runs.

    Attributes:
        reason: why, in a few words, for `status()`.
    """

    reason: str


Answer = Program | Fallback


def find_answer(
    mesh: DeviceMesh,
    local: torch.Tensor,
    source: DTensorSpec,
    target: DTensorSpec,
    async_op: bool,
    forced: bool | None,
) -> Answer:
    """The program for this local tensor, remembered or made now, ready to run; or why
    there is none.

    Raises:
        ValueError: the local tensor has another shape than its spec says, and others
            would wait for this rank.
        RuntimeError: the program needs a group that was destroyed.
    """
    why = why_not(mesh, source, target, forced, local)
    if why is not None:
        return Fallback(why)
    if (
        type(local) is not torch.Tensor or torch._C._len_torch_dispatch_stack()
    ) and is_symbolic(source.shape):
        return _answer_open_sizes(mesh, local, source, target, async_op)
    found = remembered(
        Question.of(mesh, source, target, source.shape, local.dtype, async_op), mesh
    )
    return _fitting(found, local)


def _answer_open_sizes(
    mesh: DeviceMesh,
    local: torch.Tensor,
    source: DTensorSpec,
    target: DTensorSpec,
    async_op: bool,
) -> Answer:
    """What only ends reductions is one program for all sizes, known or not. What else
    moves is that of the sizes for which the compiler traces, and guards say which
    others have the same: other ranks may know their sizes."""
    if _only_reduces(source, target):
        any_shape = (math.prod(mesh.shape),) * len(source.shape)
        return remembered(
            Question.of(mesh, source, target, any_shape, local.dtype, async_op), mesh
        )
    shape = source.shape
    traced = tuple(
        [size if isinstance(size, int) else size.node.hint for size in shape]
    )
    if None in traced or 0 in traced:
        return Fallback(SYMBOLIC)
    try:
        found = make_program(
            Question.of(mesh, source, target, traced, local.dtype, async_op), mesh
        )
        parts, least, most = guards(
            found.before,
            found.after,
            local.dtype.itemsize,
            found.at_hand.joint,
            found.cost,
        )
        if not all(map(guard_or_false, _conditions(shape, parts, least, most))):
            return Fallback(SYMBOLIC)
        tell(found)
        found = found.on_shape(tuple(map(_multiple, shape, parts)))
        found.make_ready(mesh)
    except NotPlanned as why:
        return Fallback(str(why))
    return _fitting(found, local)


def _only_reduces(source: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether all that happens is that reductions end: then the plan is all-reduces,
    which cut nothing. Not beside shards in an order of their own, which are planned
    only where they are even."""
    ends = zip(source.placements, target.placements, strict=True)
    in_order = all(
        DTensorSpec.is_default_device_order(end.shard_order) for end in (source, target)
    )
    in_order = in_order and _StridedShard not in map(type, source.placements)
    return in_order and all(
        old == new or (old.is_partial() and new.is_replicate()) for old, new in ends
    )


def _multiple(size: Any, parts: int) -> Any:
    """The same size, as a multiple, so that what it is divided into needs no
    rounding."""
    return size if isinstance(size, int) or parts == 1 else parts * (size // parts)


def _conditions(
    shape: Sequence[Any], parts: Sequence[int], least: int, most: int | None
) -> Iterator[Any]:
    """What the open sizes must be, for the compiler to guard: no more than is
    needed."""
    opened = [
        (size, many)
        for size, many in zip(shape, parts, strict=True)
        if not isinstance(size, int)
    ]
    for size, many in opened:
        if many > 1:
            yield size % many == 0
        yield size > 0
    known = math.prod([size for size in shape if isinstance(size, int)])
    elements = math.prod([size for size, _ in opened])
    if least > known * math.prod([many for _, many in opened]):
        yield elements >= -(-least // known)
    if most is not None:
        yield elements <= most // known


def remembered(question: Question, mesh: DeviceMesh) -> Answer:
    """The answer to a question; a program is ready to run."""
    answers = shared_state(mesh).remembered.answers
    found = answers.get(question)
    if found is None:
        found = _make(question, mesh)
        if len(answers) >= CACHED:
            answers.clear()
        answers[question] = found
    return found


def _make(question: Question, mesh: DeviceMesh) -> Answer:
    try:
        made = make_program(question, mesh)
        tell(made)
        _counted["made"] += 1  # overlay only
        made.make_ready(mesh)
    except NotPlanned as why:
        return Fallback(str(why))
    return made


def _fitting(found: Answer, local: torch.Tensor) -> Answer:
    """The answer, if the local tensor has the shape that its spec says. Else the
    step-by-step path runs.

    Where others would wait for this rank by a plan that it can't follow, that is an
    error. Where the step-by-step path pads shards, the plan of the others pads them
    likewise, and it is none.
    """
    if isinstance(found, Fallback) or tuple(local.shape) == found.held.length:
        return found
    program, ask = found, found.question
    padded = program.in_order and pads_step_by_step(
        program.steps, ask, program.held.length, local.shape
    )
    if collectives(program.steps) and not padded:
        raise ValueError(
            f"A local tensor of shape {program.held.length} is expected at "
            f"{ask.site.coordinate} of a mesh of shape "
            f"{ask.sizes}, since the DTensor has shape {tuple(ask.shape)} and "
            f"placements {ask.source}; on rank "
            f"{dist.get_rank()} it has shape {tuple(local.shape)}. Nothing was sent. "
            "Give DTensor.from_local the true "
            "global shape= and stride=, or the local tensor that they ask for."
        )
    return Fallback("a local tensor of another shape than its spec says")


def forget_answers(_: None = None) -> None:  # overlay only
    """Forget what redistributions found out about all meshes."""
    for shared in list(states):
        shared.remembered = Remembered()


# --- what status() says ---

_counted: Counter[str] = Counter()  # overlay only


def count_run() -> None:  # overlay only
    """Count a redistribution that a program does."""
    _counted["planned"] += 1


def count_fallback(reason: str) -> None:  # overlay only
    """Count a redistribution that runs step by step."""
    _counted[f"torch: {_kind(reason)}"] += 1


def _kind(reason: str) -> str:  # overlay only
    """A reason without what differs from case to case, so that there are few to
    count."""
    return re.sub(r" of DeviceMesh\(.*|\(.*?\)|\d+", "…", reason)


def counters() -> dict[str, object]:  # overlay only
    """What was redistributed in this process, and how."""
    fallbacks = {
        name.removeprefix("torch: "): n
        for name, n in sorted(_counted.items())
        if name.startswith("torch: ")
    }
    return {
        "redistributions by plan": _counted["planned"],
        "plans made": _counted["made"],
        "plans in the cache": sum(
            len(shared.remembered.answers) for shared in list(states)
        ),
        "collectives that more groups would save": missing_groups(),
        "redistributions by torch's own code": fallbacks,
    }


def missing_groups() -> dict[str, int]:  # overlay only
    """The calls that would make groups which plans lacked, with the collectives that
    each would have saved so far."""
    found: Counter[str] = Counter()
    answers = [
        answer
        for shared in list(states)
        for answer in list(shared.remembered.answers.values())
    ]
    for made in [
        made
        for made in answers
        if isinstance(made, Program) and collectives(made.steps) > 1
    ]:
        best = shared_plan(
            made.before, made.after, made.question.dtype.itemsize, cost=made.cost
        )
        wanted = [
            step.axes
            for step in best
            if isinstance(step, Collective) and len(step.axes) > 1
        ]
        lacked = dict.fromkeys(
            axes for axes in wanted if axes not in made.at_hand.joint
        )
        saved = (collectives(made.steps) - collectives(best)) * made.runs
        if saved > 0 and lacked:
            found[
                " and ".join(
                    flatten_call(axes, made.question.site.names) for axes in lacked
                )
            ] += saved
    return dict(found.most_common())
