"""Before reductions that only a backend can do are left to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._joint_groups import at_hand
from ._planner.cost import Cost
from ._planner.forms import shared_plan
from ._planner.rounds import in_one_round
from ._planner.steps import ReduceScatter, last_collective
from ._specs import read_ends

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ._question import Question


def make_program(question: Question, mesh: DeviceMesh) -> Program:
    """Plan. Raises NotPlanned, with the reason, where the step-by-step path has to run."""
    sizes, shape, dtype = question.sizes, tuple(question.shape), question.dtype
    ends = read_ends(question, sizes)
    before, after = ends.before.on(shape, sizes), ends.after.on(shape, sizes)
    groups, cost = at_hand(mesh, question.site), Cost.of(question.site.names, question.site.settings.topology)
    steps = shared_plan(before, after, dtype.itemsize, groups.joint, cost)
    if question.async_op:
        # The caller goes on while a reduce-scatter that comes last runs. What comes before is waited for in any case,
        # and so is an all-to-all in rounds, as on the step-by-step path.
        last = last_collective(steps)
        steps = (*steps[:last], *in_one_round(steps[last:], ReduceScatter))
    held = before.box(question.site.coordinate)
    return Program(question, held, before, after, steps, groups, ends.norm)


_REDUCED = ...
_NOT_OF_COMPLEX = ...
_check_reductions = ...
