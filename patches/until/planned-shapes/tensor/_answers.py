"""Before a rank's local tensor may have another shape than its spec says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._question import SYMBOLIC, Question, is_symbolic, why_not

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def find_answer(
    mesh: DeviceMesh,
    local: torch.Tensor,
    source: DTensorSpec,
    target: DTensorSpec,
    async_op: bool,
    forced: bool | None,
) -> Answer:
    """The program for this local tensor, remembered or made now, ready to run; or why there is none.

    Raises:
        RuntimeError: the program needs a group that was destroyed.
    """
    why = why_not(mesh, source, target, forced)
    if why is not None:
        return Fallback(why)
    shape = source.shape
    if type(local) is not torch.Tensor or torch._C._len_torch_dispatch_stack():
        why = _why_not_run(mesh, local)
        if why is not None:
            return Fallback(why)
        if is_symbolic(shape):
            return Fallback(SYMBOLIC)
    found = remembered(Question.of(mesh, source, target, shape, local.dtype, async_op), mesh)
    return _fitting(found, local)


def _fitting(found: Answer, local: torch.Tensor) -> Answer:
    """The answer, if the local tensor has the shape that its spec says. Else the step-by-step path runs."""
    if isinstance(found, Fallback) or tuple(local.shape) == found.held.length:
        return found
    return Fallback("a local tensor of another shape than its spec says")
