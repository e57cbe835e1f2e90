"""Where groups don't have the mesh's order, a redistribution finds none over axes that don't ascend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._mesh_axes import ascending
from ._settings import get_settings
from ._torch_layout import to_torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _DeviceMesh(...):
    def _get_slice_mesh_layout(self: DeviceMesh, mesh_dim_names: tuple[str, ...]) -> Any:
        layout = ascending(self, mesh_dim_names)
        # Stricter than slicing: DTensor looks for the flattened view of these axes by it, whose group sorts its ranks.
        if get_settings().share_groups == "off" and not layout.collapse().check_sorted():
            raise KeyError(f"Invalid mesh_dim_names {mesh_dim_names}: their groups would not have the mesh's order.")
        return to_torch(layout)
