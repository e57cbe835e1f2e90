"""Before a mesh can be private."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ._mesh_state import view_of
from ._mesh_traced import real_mesh


class _DeviceMesh(...):
    def _hash_key(self: DeviceMesh) -> tuple[Any, ...]:
        view, names = view_of(self), self._mesh_dim_names
        return view.rank_map.key, view.layout, self._device_type, names, self._thread_id

    def __eq__(self: DeviceMesh, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return False
        mesh = real_mesh(other)
        traits = ("_mesh_dim_names", "_device_type", "_thread_id", "_preserve_rank_order")
        return view_of(self) == view_of(mesh) and all(getattr(self, name) == getattr(mesh, name) for name in traits)
