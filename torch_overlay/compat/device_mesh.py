"""What must agree with the DeviceMesh of the very release that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from ..distributed import device_mesh as bodies
from ..distributed._mesh_state import shared_state, view_of
from ..distributed._torch_layout import to_torch
from ._mesh_layout import flattened_layout

if TYPE_CHECKING:
    from ..distributed._mesh_input import Override


class _DeviceMesh:
    """Never instantiated: its methods are set on torch's DeviceMesh."""

    def _create_flatten_mesh(self: DeviceMesh, mesh_dim_name: str, backend_override: Override = (None, None)) -> None:
        """Before 2.13, where a flattened view says its layout otherwise: torch's own code, too, finds it by that."""
        bodies._DeviceMesh._create_flatten_mesh(self, mesh_dim_name, backend_override)
        flattened = self._get_root_mesh()._flatten_mapping[mesh_dim_name]
        flattened._layout = flattened_layout(view_of(flattened).layout.axes[0])

    def __hash__(self: DeviceMesh) -> int:
        """As torch hashes an equal mesh, which may be in a dict since before enable(); from its ranks as a tuple."""
        if self._hash is None:
            ranks = _Hashed(view_of(self).rank_map.ranks_hash)
            layout = to_torch(view_of(self).layout)  # its own may be spelled otherwise, which some releases do
            key: tuple[Any, ...] = (ranks, layout, self._device_type, self._mesh_dim_names, self._thread_id)
            if shared_state(self).private is not None:
                key = (*key, shared_state(self).private)
            self._hash = hash((*key, self._preserve_rank_order) if ORDER_IS_HASHED else key)
        return self._hash


class _Hashed:
    """Stands in a key for a value of which only the hash is at hand."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        return self.value


# Since 2.15 the order of the ranks in groups is a part of a mesh's value.
ORDER_IS_HASHED = "_preserve_rank_order" in DeviceMesh.__annotations__
