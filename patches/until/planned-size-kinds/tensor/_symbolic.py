"""Before it is asked whether the bytes of a tensor are rounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._planner.forms import plan_and_parts
from ._planner.regions import NotPlanned
from ._program import Program, make_program
from ._question import SYMBOLIC, Question

if TYPE_CHECKING:
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
_kinds_differ = ...
