"""The question that a redistribution asks: everything its plan depends on, as one
frozen value. It is the key of the cache of answers.

A question holds no mesh, so that a mesh and its process groups can be freed while
answers are remembered.
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
    """Which tensor goes from which placements to which, on which mesh.

    Attributes:
        site: the mesh, as this rank sees it.
        source, target: the placements before and after.
        kinds: the classes of both. An instance of a subclass may compare equal to one
            of its base class, and mean something else.
        source_order, target_order: for each tensor dim the mesh dims that shard it,
            outer to inner, as in the specs.
        shape: the global shape.
        dtype: the dtype of the tensor.
        async_op: the caller goes on before the last collective has finished.
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
        """The question of a redistribution between specs with these placements on
        `mesh`, which has process groups and contains this rank."""
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
        """The sizes of the mesh dims."""
        return self.site.view.layout.top_level_sizes


def why_not(
    mesh: DeviceMesh,
    source: DTensorSpec,
    target: DTensorSpec,
    forced: bool | None = None,
    local: torch.Tensor | None = None,
) -> str | None:
    """Say why the step-by-step path must run before a plan is even looked for, or None.

    This decides what doesn't depend on the placements: the options, the mesh, this
    rank, the class of the local tensor and the modes that are on. It is asked at every
    redistribution, so it only reads flags and types. Whether the change itself can be
    planned, `specs.read_ends` and `program.make_program` decide, once for each
    question.
    """
    if not config.plan_redistribution:
        return "plans are turned off"
    # Both name an algorithm of the step-by-step path, so the caller wants its steps.
    if (
        forced is not None
        or _redistribute._FORCE_MIN_COST_REDISTRIBUTION_PLAN is not None
    ):
        return "an algorithm for the steps was asked for"
    if _redistribute._DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION:
        return "the step-by-step path was asked for, unmerged"
    # A subclass may lay its ranks out in another way; a mesh made without process
    # groups has nothing to communicate by.
    if type(mesh) is not DeviceMesh or group_names(mesh) is None:
        return "a mesh that isn't DeviceMesh's own, or has no groups"
    if not is_initialized():
        return "no world"
    if source.mesh is not target.mesh and source.mesh != target.mesh:
        return "another mesh"
    # It has no shard, and takes no part in any collective.
    if mesh._coordinate_on_dim is None:
        return "this rank isn't in the mesh"
    # The usual eager case ends here. No mode is on, so neither symbolic sizes nor a
    # process that stands for many ranks are possible.
    if type(local) is torch.Tensor and not torch._C._len_torch_dispatch_stack():
        return None
    # A program is made for the coordinate of one rank.
    if stands_for_many_ranks(mesh):
        return MANY_RANKS
    if local is None:
        return SYMBOLIC if is_symbolic(source.shape) else None
    # An async tensor is a plain tensor that isn't there yet.
    inner = local.elem if isinstance(local, AsyncCollectiveTensor) else local
    # A subclass may only implement the operations that the step-by-step path calls.
    return (
        None
        if type(inner) in _PLAIN_TENSORS
        else "a local tensor of a class of its own"
    )


def is_symbolic(shape: Sequence[object]) -> bool:
    """True if some size isn't a plain int: it is a symbol."""
    return bool({*map(type, shape)} - {int})


def stands_for_many_ranks(mesh: DeviceMesh) -> bool:
    """True in LocalTensorMode, and while one rank compiles for all: no coordinate is
    its own."""
    # Not imported: the mode can only be on if somebody has imported it.
    local_tensor = sys.modules.get("torch.distributed._local_tensor")
    if (
        local_tensor is not None
        and local_tensor.enabled_local_tensor_mode() is not None
    ):
        return True
    # Compiling for all ranks makes the coordinate a symbol.
    return mesh.ndim > 0 and isinstance(mesh._sym_get_coordinate(0), torch.SymInt)
