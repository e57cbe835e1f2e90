"""Before the constructor makes groups in another way."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group, get_rank

from ._mesh_input import check_in_world, read_names, read_overrides, read_view
from ._mesh_state import join_state, thread_id


class _DeviceMesh(...):
    def __init__(
        self: DeviceMesh,
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: _Names | None = None,
        backend_override: tuple[Override, ...] | None = None,
        preserve_rank_order: bool = False,
        _init_backend: bool = True,
        _rank: int | None = None,
        _layout: Any = None,
        _rank_map: RankMap | torch.Tensor | None = None,
        _root_mesh: DeviceMesh | None = None,
    ) -> None:
        torch._C._log_api_usage_once("torch.distributed.device_mesh.DeviceMesh.__init__")
        view = read_view(mesh, _layout, _rank_map)
        overrides = read_overrides(backend_override, len(view.layout.axes))
        self._mesh_dim_names = read_names(mesh_dim_names, len(view.layout.axes))
        shared = join_state(self, view, _root_mesh)  # sets _layout, _view, _shared_state
        self._device_type = device_type
        self._root_mesh = None if _root_mesh is None else _root_mesh._get_root_mesh()
        self._preserve_rank_order = preserve_rank_order
        # A new view's own are empty: look-ups go through its root.
        self._flatten_mapping = shared.flattened if _root_mesh is None else {}
        self._pg_registry = shared.registry if _root_mesh is None else {}
        self._thread_id = None
        self._hash: int | None = None
        if device_type == "xla":
            return  # DeviceMesh makes no groups on XLA, and sets no rank or coordinates
        if _init_backend:
            self._setup_world_group_and_device()  # makes the default group if there is none
            check_in_world(shared.rank_map)
            self._dim_group_names = self._init_process_groups(
                self._layout, self._rank_map, self._mesh_dim_names, overrides
            )
            for name in self._dim_group_names:
                shared.registry[name] = _resolve_process_group(name)
        self._thread_id = thread_id()
        self._rank = get_rank() if _rank is None else _rank
        self._coordinate_on_dim = self._compute_coordinate_on_dim()
