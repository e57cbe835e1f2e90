"""What differs between releases in DTensor and its redistribution."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _redistribute as torch_redistribute

from ..distributed.tensor import _redistribute as bodies


class _Redistribute:
    """Never instantiated: its method is set on torch's autograd function of this name."""

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
        """Before 2.13, where the types are arguments of their own; see the body for later ones."""
        if bodies.has_other_groups(input._spec.mesh, device_mesh):
            own = input._spec.mesh
            return bodies.lay_on(
                device_mesh, cls.apply(input, own, placements, async_op, forward_dtype, backward_dtype)
            )
        made = None
        input = bodies.cast_in_order(input, forward_dtype)
        if cls is torch_redistribute.Redistribute and forward_dtype in (None, input._local_tensor.dtype):
            made = bodies.without_node(input, device_mesh, placements, async_op)
        if made is not None:
            return made
        return super(torch_redistribute.Redistribute, cls).apply(  # type: ignore[misc]
            input, device_mesh, placements, async_op, forward_dtype, backward_dtype
        )
