"""The question that a redistribution asks: all that its plan depends on, as one frozen
value, the key of the cache.

It holds no mesh, so that a mesh and its groups may go although their questions are
remembered.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import is_initialized
from torch.distributed.tensor import _redistribute

from ... import config
from ..._mesh.state import group_names
from .at_hand import Site

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import Placement

SYMBOLIC = "a symbolic shape"
MANY_RANKS = "a mode in which one process stands for many ranks"
_PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor}


class Question(NamedTuple):
    """What is asked.

    Attributes:
        site: the mesh.
        source, target: the placements before and after.
        kinds: the classes of both, since a subclass may call itself equal.
        source_order, target_order: the axes that shard each dim, outer to inner, as the
        specs say it.
        shape: of the whole tensor.
        dtype: of the tensor.
        async_op: whether the caller goes on before the last collective is done.
    """

    site: Site
    source: tuple[Placement, ...]
    target: tuple[Placement, ...]
    kinds: tuple[type, ...]
    source_order: Any
    target_order: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    async_op: bool = False

    @staticmethod
    def of(
        mesh: DeviceMesh,
        source: DTensorSpec,
        target: DTensorSpec,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        async_op: bool = False,
    ) -> Question:
        """Ask for the move of a tensor from one spec to the other."""
        return Question(
            Site.of(mesh),
            source.placements,
            target.placements,
            tuple(map(type, (*source.placements, *target.placements))),
            source.shard_order,
            target.shard_order,
            shape,
            dtype,
            async_op,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the mesh, by axis."""
        return self.site.view.layout.top_level_sizes


def why_not(
    mesh: DeviceMesh,
    source: DTensorSpec,
    target: DTensorSpec,
    forced: bool | None = None,
    local: torch.Tensor | None = None,
) -> str | None:
    """Why no question is asked, so that the step-by-step path runs; None if one is.
    Whether there is a plan is for the planner to say, which raises NotPlanned with the
    reason.

    Args:
        mesh: of both specs, as a real `DeviceMesh`, for which a spec may hold a
            stand-in.
        forced: the caller's ``use_graph_based_transform``.
        local: what is redistributed; None where only the plan is asked for.
    """
    if not config.plan_redistribution:
        return "plans are turned off"
    if (
        forced is not None
        or _redistribute._FORCE_MIN_COST_REDISTRIBUTION_PLAN is not None
    ):
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
    if type(local) is torch.Tensor and not torch._C._len_torch_dispatch_stack():
        return None  # nothing below can be
    if stands_for_many_ranks(mesh):
        return MANY_RANKS
    if local is None:
        return SYMBOLIC if is_symbolic(source.shape) else None
    inner = local.elem if isinstance(local, AsyncCollectiveTensor) else local
    # A class of its own may only know the operations of the step-by-step path.
    return (
        None
        if type(inner) in _PLAIN_TENSORS
        else "a local tensor of a class of its own"
    )


def is_symbolic(shape: Sequence[object]) -> bool:
    """Whether a size isn't known."""
    return bool({*map(type, shape)} - {int})


def stands_for_many_ranks(mesh: DeviceMesh) -> bool:
    """Whether one process stands for many ranks, so that no coordinate is this rank's:
    in LocalTensorMode, and while code is compiled on one rank for all."""
    local_tensor = sys.modules.get("torch.distributed._local_tensor")
    if (
        local_tensor is not None
        and local_tensor.enabled_local_tensor_mode() is not None
    ):
        return True
    return mesh.ndim > 0 and isinstance(mesh._sym_get_coordinate(0), torch.SymInt)
