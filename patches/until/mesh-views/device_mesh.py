"""Before a rank map takes no memory: one for all ranks is a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ._mesh_input import check_device_type, check_names, normalize_overrides, read_sizes
from ._mesh_layout import _MeshLayout

if TYPE_CHECKING:
    from collections.abc import Mapping


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    backend_override: Mapping[int | str, Any] | None = None,
) -> DeviceMesh:
    check_names(mesh_shape, mesh_dim_names)
    overrides = None
    if backend_override is not None:
        overrides = normalize_overrides(backend_override, len(mesh_shape), mesh_dim_names)
    check_device_type(device_type)
    layout = _MeshLayout.from_sizes_strides(read_sizes(mesh_shape))
    return DeviceMesh(
        device_type,
        _layout=layout,
        _rank_map=torch.arange(layout.numel(), dtype=torch.int, device="cpu"),
        mesh_dim_names=mesh_dim_names,
        backend_override=overrides,
    )
