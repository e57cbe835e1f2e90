"""Before it is asked whether a tensor shares its plan with others."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ._planner.forms import plan_and_parts, without_sizes
from ._planner.regions import NotPlanned
from ._program import Program, make_program
from ._question import SYMBOLIC, Question

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def plan_open_sizes(
    mesh: DeviceMesh, dtype: torch.dtype, source: DTensorSpec, target: DTensorSpec, async_op: bool
) -> Program:
    """A program for all sizes that the trace may stand for; asks the compiler for guards.

    Raises:
        NotPlanned: a size that is cut isn't known to be a multiple, even with a guard; or there is no plan.
    """
    shape = source.shape
    traced = tuple([size if isinstance(size, int) else size.node.hint for size in shape])
    if None in traced or 0 in traced:
        raise NotPlanned(SYMBOLIC)
    found = make_program(Question.of(mesh, source, target, traced, dtype, async_op), mesh)
    _, parts = plan_and_parts(found.before, found.after, dtype.itemsize, found.at_hand.joint, found.cost)
    for dim in _open_dims(shape):
        if parts[dim] > 1:
            _guard(shape[dim] % parts[dim] == 0)
        _guard(shape[dim] > 0)
    _guard_elements(Trace(found, mesh, shape), parts)
    return _with_symbols(found, mesh, tuple([_multiple(size, parts[dim]) for dim, size in enumerate(shape)]))


_guard_plan = ...
_may_share = ...
_plans_differ = ...
_guard_kind = ...


def _guard_elements(trace: Trace, parts: Sequence[int]) -> None:
    """Ask for guards on the number of elements, where another number would have another plan.

    The plan depends on the product of the sizes alone, so it is enough to vary the first; the others stay as traced. A
    size is counted in its parts. For example, 64 in parts of 4 is 16 of them: of 4, 8, ... 64, 68, ... the last with
    the traced plan is found by bisection. The least sizes are one part each.

    Where shards become terms, the plan may change back with more elements: it is that of the traced sizes alone.
    """
    dims, plan = _open_dims(trace.shape), without_sizes(trace.found.steps)
    before, after = trace.found.before, trace.found.after
    if (after.pending - before.pending) & before.sharded:
        for dim, size in zip(dims, trace.sizes, strict=True):
            _guard(trace.shape[dim] == size)
        return
    steps = [parts[dim] for dim in dims]
    first, *others = [size // step for size, step in zip(trace.sizes, steps, strict=True)]

    def sizes(counts: Sequence[int]) -> list[int]:
        return [step * count for step, count in zip(steps, counts, strict=True)]

    def same(counts: Sequence[int]) -> bool:
        return trace.steps(sizes(counts)) == plan

    def last_same(bound: int) -> int:
        """The elements with as many parts of the first dim, towards this bound, as have the same plan."""
        return math.prod(sizes((_last_same(first, bound, lambda number: same((number, *others))), *others)))

    elements = math.prod([trace.shape[dim] for dim in dims])
    if not same([1] * len(dims)):
        _guard(elements >= last_same(0))
    if not same([_FAR] * len(dims)):
        _guard(elements <= last_same(_FAR))
