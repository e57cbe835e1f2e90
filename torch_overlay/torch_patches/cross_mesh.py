"""Let `DTensor.redistribute` go to another mesh, which stock torch refuses.

The method asks first whether the mesh is another one. A redistribution on its own mesh costs one comparison more.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from ..transfers.options import BUDGET

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def install_cross_mesh() -> Any:
    """Replace `DTensor.redistribute` by a method that also goes to another mesh. Returns torch's."""
    one_mesh = vars(DTensor)["redistribute"]

    @functools.wraps(one_mesh)
    def redistribute(
        self: DTensor, device_mesh: DeviceMesh | None = None, placements: Any = None, **options: Any
    ) -> DTensor:
        """Do what torch's method does; to another mesh, what `_to_other_mesh` does."""
        mesh = self.device_mesh
        if device_mesh is None or device_mesh is mesh or device_mesh == mesh or placements is None:
            return one_mesh(self, device_mesh, placements, **options)  # type: ignore[no-any-return]
        # A fake or functional tensor has no values to send: torch says so in its own words.
        if type(self._local_tensor) not in (torch.Tensor, AsyncCollectiveTensor):
            return one_mesh(self, device_mesh, placements, **options)  # type: ignore[no-any-return]
        return _to_other_mesh(self, device_mesh, tuple(placements), **options)

    DTensor.redistribute = redistribute  # type: ignore[method-assign]
    return one_mesh


def uninstall_cross_mesh(one_mesh: Any) -> None:
    DTensor.redistribute = one_mesh  # type: ignore[method-assign]


def _to_other_mesh(
    tensor: DTensor,
    mesh: DeviceMesh,
    placements: tuple[Any, ...],
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """Redistribute a tensor to another mesh. Collective over the ranks of both meshes."""
    wanted = forward_dtype or tensor.dtype
    if backward_dtype not in (None, tensor.dtype, wanted):
        raise NotImplementedError(
            f"A redistribution to another mesh brings gradients back as {wanted} or as {tensor.dtype}, not as "
            f"{backward_dtype}. Leave backward_dtype out, and cast the gradient."
        )
    from ..transfers.redistribution import redistribute

    source = tensor if tensor.dtype == wanted else tensor.to(wanted)
    return redistribute(source, mesh, placements, budget=BUDGET)  # type: ignore[no-any-return]
