"""Before redistributions are planned: torch's own way, with its merging only where that is exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import _redistribute as torch_redistribute

from .._kept import keep
from ._safe_merging import merging_only_where_exact

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

redistribute_by_steps = keep(torch_redistribute.redistribute_local_tensor)


def redistribute_local_tensor(
    local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, **options: Any
) -> torch.Tensor:
    """What this rank holds of the tensor under the target spec, from what it holds under the current one."""
    with merging_only_where_exact(current_spec, target_spec):
        return redistribute_by_steps(local_tensor, current_spec, target_spec, **options)
