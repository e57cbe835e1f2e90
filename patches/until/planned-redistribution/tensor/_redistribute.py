"""Before redistributions are planned: torch's own way, with its merging only where that is exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import _redistribute as torch_redistribute

from .._kept import keep
from ._safe_merging import exact_merging, merging

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

redistribute_by_steps = keep(torch_redistribute.redistribute_local_tensor)


def redistribute_local_tensor(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    use_graph_based_transform: bool | None = None,
    is_explicit: bool = False,
) -> torch.Tensor:
    """What this rank holds of the tensor under the target spec, from what it holds under the current one."""
    with merging(exact_merging(current_spec, target_spec)):
        return redistribute_by_steps(
            local_tensor,
            current_spec,
            target_spec,
            async_op=async_op,
            use_graph_based_transform=use_graph_based_transform,
            is_explicit=is_explicit,
        )
