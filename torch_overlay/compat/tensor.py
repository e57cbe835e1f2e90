"""The autograd function of a redistribution before 2.13."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _redistribute as torch_redistribute

from ..distributed.tensor import _redistribute as bodies


class _Redistribute:
    """Body of a method of torch's autograd function of this name. Never instantiated."""

    @classmethod
    def apply(
        cls,
        input: DTensor,
        device_mesh: DeviceMesh,
        placements: Any,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Before 2.13, where the dtypes are separate arguments; `distributed/tensor/_redistribute.py` has the later
        body."""
        mesh = input._spec.mesh
        if bodies.has_other_groups(mesh, device_mesh):
            moved = cls.apply(input, mesh, placements, async_op, forward_dtype, backward_dtype)
            return bodies.lay_on(device_mesh, moved)
        result = None
        input = bodies.cast_in_order(input, forward_dtype)
        if cls is torch_redistribute.Redistribute and forward_dtype in (None, input._local_tensor.dtype):
            result = bodies.without_node(input, device_mesh, placements, async_op)
        if result is not None:
            return result
        return super(torch_redistribute.Redistribute, cls).apply(  # type: ignore[misc]
            input, device_mesh, placements, async_op, forward_dtype, backward_dtype
        )
