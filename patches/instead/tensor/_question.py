"""Upstream plans can be turned off."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed import config
from torch.distributed._local_tensor import enabled_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import is_initialized
from torch.distributed.tensor import _redistribute

from .._mesh_group_names import group_names

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def why_not(mesh: DeviceMesh, source: DTensorSpec, target: DTensorSpec, forced: bool | None = None) -> str | None:
    """Why no question can be asked, whatever the tensor; None if one can."""
    if not config.plan_redistribution:
        return "plans are turned off"
    if forced is not None or _redistribute._FORCE_MIN_COST_REDISTRIBUTION_PLAN is not None:
        return "an algorithm for the steps was asked for"
    if _redistribute._DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION:
        return "the step-by-step path was asked for, unmerged"
    if type(mesh) is not DeviceMesh or group_names(mesh) is None:
        return "a mesh that isn't DeviceMesh's own, or has no groups"
    if not is_initialized():
        return "no world"
    if source.mesh is not target.mesh and source.mesh != target.mesh:
        return "another mesh"
    if mesh._coordinate_on_dim is None:
        return "this rank isn't in the mesh"
    return None


def stands_for_many_ranks(mesh: DeviceMesh) -> bool:
    """Whether one process stands for many ranks, so that no coordinate is this rank's: in LocalTensorMode, and while
    code is compiled on one rank for all."""
    if enabled_local_tensor_mode() is not None:
        return True
    return mesh.ndim > 0 and isinstance(mesh._sym_get_coordinate(0), torch.SymInt)
