"""Before 2.15, and before the constructor checks names and ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ._mesh_input import read_view
from ._mesh_state import join_state


class _DeviceMesh(...):
    def __init__(
        self: DeviceMesh,
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: _Names | None = None,
        backend_override: tuple[Override, ...] | None = None,
        _init_backend: bool = True,
        _rank: int | None = None,
        _layout: Any = None,
        _rank_map: RankMap | torch.Tensor | None = None,
        _root_mesh: DeviceMesh | None = None,
    ) -> None:
        torch._C._log_api_usage_once("torch.distributed.device_mesh.DeviceMesh.__init__")
        view = read_view(mesh, _layout, _rank_map)
        shared = join_state(self, view, _root_mesh)  # sets _layout, _view, _shared_state
        self._device_type = device_type
        self._mesh_dim_names = tuple(mesh_dim_names) if mesh_dim_names else None
        self._root_mesh = None if _root_mesh is None else _root_mesh._get_root_mesh()
        # A new view's own are empty: look-ups go through its root.
        self._flatten_mapping = shared.flattened if _root_mesh is None else {}
        self._pg_registry = shared.registry if _root_mesh is None else {}
        self._thread_id = None
        if backend_override is None:
            ...
        if device_type != "xla":
            ...

        self._hash: int | None = None
