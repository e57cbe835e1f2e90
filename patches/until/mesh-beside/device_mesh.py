"""Before views with axes of several views say whose they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._mesh_axes import ascending, select_groups
from ._mesh_state import make_view
from ._torch_layout import from_torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _DeviceMesh(...):
    def __getitem__(self: DeviceMesh, mesh_dim_names: str | _Names) -> DeviceMesh:
        """The view of these axes, in the mesh's order; flattened views count by their names."""
        if not self._mesh_dim_names:
            raise RuntimeError("Cannot slice a DeviceMesh without mesh_dim_names!")
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if names == self._mesh_dim_names:
            return self
        return make_view(self, ascending(self, names), names, select_groups(self, names))

    def _create_sub_mesh(self: DeviceMesh, layout: Any, submesh_dim_names: _Names) -> DeviceMesh:
        return make_view(self, from_torch(layout), submesh_dim_names, select_groups(self, submesh_dim_names))
