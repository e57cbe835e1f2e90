"""Before a plan is asked for its cost, without being run."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from .._mesh_state import shared_state
from ._planner.regions import NotPlanned
from ._program import make_program

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ._question import Question


def remembered(question: Question, mesh: DeviceMesh) -> Answer:
    """The answer to a question; a program is ready to run."""
    answers = shared_state(mesh).remembered.answers
    found = answers.get(question)
    if found is None:
        found = _make(question, mesh)
        with _lock:
            answers[question] = found
    if len(answers) > CACHED // 2:  # before, nobody asks which one is the oldest soon
        with _lock, contextlib.suppress(KeyError):  # another thread may have forgotten it
            answers.move_to_end(question)
            if len(answers) > CACHED:
                answers.popitem(last=False)
    return found


def _make(question: Question, mesh: DeviceMesh) -> Answer:
    try:
        made = make_program(question, mesh)
        made.make_ready(mesh)
    except NotPlanned as why:
        return Fallback(str(why))
    return made


why_not_planned = ...
