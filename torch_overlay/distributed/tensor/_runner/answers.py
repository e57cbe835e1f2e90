"""Answers to the question of a redistribution: a program, or the reason why the
step-by-step path runs. Start reading at `find_answer`.

Each answer is made once. It lives in the state that all views of one root mesh share,
and is freed with the last of them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.symbolic_shapes import guard_or_false

from ..._mesh.state import Remembered, shared_state, states
from .._planner.cost import collectives
from .._planner.regions import NotPlanned
from .._planner.sizes import guards
from .program import Program, make_program, tell
from .question import SYMBOLIC, Question, is_symbolic, why_not
from .specs import pads_step_by_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh


CACHED = 4096  # answers that the views of one root mesh remember at most


class Fallback(NamedTuple):
    """The answer that the step-by-step path runs.

    Attributes:
        reason: why, in a few words, for logs and counters.
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
    """Return a program for this local tensor, ready to run, or the reason why there is
    none, from `why_not`, which reads flags and types at every call, or a NotPlanned. No
    other function decides. A new answer is remembered, and a new plan is logged."""
    reason = why_not(mesh, source, target, forced, local)
    if reason is not None:
        return Fallback(reason)
    try:
        return _find_program(mesh, local, source, target, async_op)
    except NotPlanned as error:
        return Fallback(str(error))


def _find_program(
    mesh: DeviceMesh,
    local: torch.Tensor,
    source: DTensorSpec,
    target: DTensorSpec,
    async_op: bool,
) -> Program:
    """Return the program of `find_answer`, for a change that may be planned."""
    shape, dtype = source.shape, local.dtype
    # In plain eager mode every size is known, so don't look at each.
    eager = type(local) is torch.Tensor and not torch._C._len_torch_dispatch_stack()
    if eager or not is_symbolic(shape):
        question = Question.of(mesh, source, target, shape, dtype, async_op)
        program = _remembered(question, mesh)
    elif _only_reduces(source, target):
        # All-reduces cut nothing, so any shape gives the same plan. This one is never
        # cut unevenly.
        any_shape = (math.prod(mesh.shape),) * len(shape)
        question = Question.of(mesh, source, target, any_shape, dtype, async_op)
        return _remembered(question, mesh)
    else:
        traced = tuple(
            [size if isinstance(size, int) else size.node.hint for size in shape]
        )
        question = Question.of(mesh, source, target, traced, dtype, async_op)
        program = _make_for_open_sizes(question, mesh, shape)
    if tuple(local.shape) != program.held.length:
        _refuse_shape(program, local)
    return program


def _make_for_open_sizes(
    question: Question, mesh: DeviceMesh, shape: Sequence[Any]
) -> Program:
    """Make the program for a tensor some of whose sizes are symbols; the question has
    the traced sizes, or None.

    Other sizes that pass the guards have the same plan. A rank that knows its sizes
    makes its plan without guards, so both must agree.
    """
    # Without a hint there is nothing to plan for. An empty tensor moves nothing, so its
    # plan tells nothing about other sizes.
    if None in question.shape or 0 in question.shape:
        raise NotPlanned(SYMBOLIC)
    program = make_program(question, mesh)
    pieces, least, most = guards(
        program.before,
        program.after,
        question.dtype.itemsize,
        program.at_hand.joint,
        program.cost,
    )
    # Nothing is assumed of an unbacked symbol, whose value nobody knows.
    if not all(map(guard_or_false, _conditions(shape, pieces, least, most))):
        raise NotPlanned(SYMBOLIC)
    tell(program)
    program = program.on_shape(tuple(map(_multiple, shape, pieces)))
    program.make_ready(mesh)
    return program


def _only_reduces(source: DTensorSpec, target: DTensorSpec) -> bool:
    """True if the change only ends reductions, by all-reduces, which cut nothing. False
    beside shards in an explicit shard order or strided shards, which are planned only
    if they are even, and so depend on the sizes."""
    ends = zip(source.placements, target.placements, strict=True)
    in_order = all(
        DTensorSpec.is_default_device_order(spec.shard_order)
        for spec in (source, target)
    )
    in_order = in_order and _StridedShard not in map(type, source.placements)
    return in_order and all(
        old == new or (old.is_partial() and new.is_replicate()) for old, new in ends
    )


def _multiple(size: Any, parts: int) -> Any:
    """Return the size, which must be one, as a multiple of `parts`: its quotient needs
    no rounding."""
    return size if isinstance(size, int) or parts == 1 else parts * (size // parts)


def _conditions(
    shape: Sequence[Any], parts: Sequence[int], least: int, most: int | None
) -> Iterator[Any]:
    """Yield what symbolic sizes must fulfill to have this plan, for the compiler to
    guard. What holds anyway isn't given, since every guard may cause a
    recompilation."""
    symbolic = [
        (size, part)
        for size, part in zip(shape, parts, strict=True)
        if not isinstance(size, int)
    ]
    for size, part in symbolic:
        if part > 1:
            yield size % part == 0
        yield size > 0
    known = math.prod([size for size in shape if isinstance(size, int)])
    elements = math.prod([size for size, _ in symbolic])
    # Implied otherwise: every symbolic length is at least one multiple of its part.
    if least > known * math.prod([part for _, part in symbolic]):
        yield elements >= -(-least // known)
    if most is not None:
        yield elements <= most // known


def _remembered(question: Question, mesh: DeviceMesh) -> Program:
    """Return the program for a question, or the reason why there is none, made and
    logged once. `CACHED` answers are kept; at the next one all are forgotten."""
    answers = shared_state(mesh).remembered.answers
    answer = answers.get(question)
    if answer is None:
        try:
            answer = make_program(question, mesh)
            tell(answer)
            counted["made"] += 1  # overlay only
            answer.make_ready(mesh)
        except NotPlanned as error:
            # Not the error itself: its traceback would keep the mesh alive.
            answer = Fallback(str(error))
        # Clear all: a program that changes its shapes at every step would otherwise
        # keep every plan. What is still in use is planned again.
        if len(answers) >= CACHED:
            answers.clear()
        answers[question] = answer
    if isinstance(answer, Fallback):
        raise NotPlanned(answer.reason)
    return answer


def _refuse_shape(program: Program, local: torch.Tensor) -> NoReturn:
    """Raise for a local tensor of another shape than its spec's: NotPlanned if this
    rank may take the step-by-step path alone, else ValueError. It may if others don't
    wait: the plan has no collective, or the padded all-gather that this path runs,
    too."""
    question = program.question
    padded = program.in_order and pads_step_by_step(
        program.steps, question, program.held.length, local.shape
    )
    if padded or not collectives(program.steps):
        raise NotPlanned("a local tensor of another shape than its spec says")
    raise ValueError(
        f"A local tensor of shape {program.held.length} is expected at "
        f"{question.site.coordinate} of a mesh of shape "
        f"{question.sizes}, since the DTensor has shape "
        f"{tuple(question.shape)} and placements {question.source}; on rank "
        f"{dist.get_rank()} it has shape {tuple(local.shape)}. Nothing was sent. "
        "Give DTensor.from_local the true "
        "global shape= and stride=, or the local tensor that they ask for."
    )


def forget_answers(_: None = None) -> None:  # overlay only
    """Forget the answers and looked-up groups of all meshes."""
    for shared in list(states):
        shared.remembered = Remembered()


# How redistributions of this process ran: by plan, or why by torch's own code.
counted: Counter[str] = Counter()  # overlay only


def count_run() -> None:  # overlay only
    """Count a redistribution that runs by a program, for `status()`."""
    counted["planned"] += 1


def count_fallback(reason: str) -> None:  # overlay only
    """Count a redistribution that runs step by step, for `status()`, by its reason."""
    counted[f"torch: {_general_reason(reason)}"] += 1


def _general_reason(reason: str) -> str:  # overlay only
    """Return a reason without numbers, shapes and meshes, to count equal causes
    together."""
    return re.sub(r" of DeviceMesh\(.*|\(.*?\)|\d+", "…", reason)
