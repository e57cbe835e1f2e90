"""Before sizes that a compiler leaves open have plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._question import SYMBOLIC

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def _answer_open_sizes(
    mesh: DeviceMesh, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, async_op: bool
) -> Answer:
    """There is no plan yet for sizes that a compiler leaves open."""
    return Fallback(SYMBOLIC)
