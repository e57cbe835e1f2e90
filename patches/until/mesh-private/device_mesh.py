"""Before a mesh can be private."""

from __future__ import annotations

from typing import Any

from ._mesh_state import view_of


class _DeviceMesh(...):
    def _hash_key(self: DeviceMesh) -> tuple[Any, ...]:
        view, names = view_of(self), self._mesh_dim_names
        return view.rank_map.key, view.layout, self._device_type, names, self._thread_id
