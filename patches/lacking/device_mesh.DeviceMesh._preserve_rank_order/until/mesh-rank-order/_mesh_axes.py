"""Before 2.15 and before mesh-rank-order: groups sort their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._mesh_layout import _MeshLayout
from ._mesh_state import view_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def side_by_side(meshes: Sequence[DeviceMesh]) -> _MeshLayout:
    """All axes of several views over one rank map.

    Raises:
        RuntimeError: meshes over different rank maps, axes that share ranks, or names on some axes only.
    """
    if any(view_of(mesh).rank_map != view_of(meshes[0]).rank_map for mesh in meshes):
        raise RuntimeError("Cannot concatenate DeviceMeshes derived from different device meshes")
    if len({mesh._mesh_dim_names is None for mesh in meshes}) > 1:
        raise RuntimeError(f"Cannot concatenate meshes with and without mesh_dim_names: {meshes}")
    layout = _MeshLayout(tuple(axis for mesh in meshes for axis in view_of(mesh).layout.axes))
    if not layout.collapse().check_orthogonal():
        raise RuntimeError(f"Cannot concatenate overlapping meshes: {meshes}")
    return layout
