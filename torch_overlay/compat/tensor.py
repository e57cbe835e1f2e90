"""What differs between releases in DTensor and its redistribution."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _redistribute as torch_redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from ..distributed._mesh.caches import as_good_as
from ..distributed._torch_originals import original
from ..distributed.tensor import _redistribute as bodies
from ._mesh_layout import ShardOrderEntry


class _Redistribute:
    """Never instantiated: its method is set on torch's autograd function of this name."""

    @classmethod
    def apply(
        cls,
        input: DTensor,
        device_mesh: DeviceMesh,
        placements: Any,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Before 2.13, where the types are arguments of their own; see the body for later ones."""
        if bodies.has_other_groups(input._spec.mesh, device_mesh):
            own = input._spec.mesh
            return bodies.lay_on(
                device_mesh, cls.apply(input, own, placements, async_op, forward_dtype, backward_dtype)
            )
        made = None
        input = bodies.cast_in_order(input, forward_dtype)
        if cls is torch_redistribute.Redistribute and forward_dtype in (None, input._local_tensor.dtype):
            made = bodies.without_node(input, device_mesh, placements, async_op)
        if made is not None:
            return made
        return super(torch_redistribute.Redistribute, cls).apply(  # type: ignore[misc]
            input, device_mesh, placements, async_op, forward_dtype, backward_dtype
        )


class _OldestRedistribute:
    """The same, before 2.10."""

    @classmethod
    def apply(cls, input: DTensor, device_mesh: DeviceMesh, placements: Any, *options: Any, **named: Any) -> DTensor:
        """Where a strided shard says that it equals a plain one, and torch would move nothing."""
        if [*map(type, input._spec.placements)] != [*map(type, placements)]:
            placements = list(placements)  # a list equals no tuple, so torch moves; its spec makes a tuple of it
        return _Redistribute.apply.__func__(cls, input, device_mesh, placements, *options, **named)  # type: ignore[attr-defined]


def redistribute_local_tensor(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    is_backward: bool = False,
    use_graph_based_transform: bool | None = None,
    is_explicit: bool = False,
) -> torch.Tensor:
    """Before 2.11, where a gradient is made whole here that would become the terms of a sum, and who asks for it takes
    it for whole."""
    if is_backward and any(placement.is_partial() for placement in target_spec.placements):
        whole = tuple(Replicate() if placement.is_partial() else placement for placement in target_spec.placements)
        target_spec = dataclasses.replace(target_spec, placements=whole)
    return bodies.redistribute_local_tensor(
        local_tensor,
        current_spec,
        target_spec,
        async_op=async_op,
        use_graph_based_transform=use_graph_based_transform,
        is_explicit=is_explicit,
    )


def merged(infos: list[Any], mesh: DeviceMesh, source: Any, target: Any) -> list[Any]:
    """Torch's steps from one list of placements to another, merged over flattened meshes as torch does; since 2.11."""
    merge = getattr(torch_redistribute, "_optimize_transform_infos", None)
    return infos if merge is None else merge(infos, mesh, source, target)


def shards_become_terms() -> bool:
    """Whether torch has a step from a shard to a term of a sum; since 2.14."""
    return hasattr(Shard, "_to_partial_tensor")


# Before 2.10 torch searches no graph for steps, and a tensor's dims are cut by one mesh axis after the other.
_FORCE_MIN_COST_REDISTRIBUTION_PLAN = None

# Before 2.11 torch merges nothing.
_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION = False


equals_by_value = original(DTensorSpec, "__eq__")


class _DTensorSpec:
    """Never instantiated: its attributes are set on torch's DTensorSpec."""

    shard_order = None

    def __eq__(self: DTensorSpec, other: Any, /) -> bool:  # type: ignore[misc]
        """As the body of `_check_equals`, which torch has since 2.10."""
        return equals_by_value(self, other) and as_good_as(self.mesh, other.mesh)

    @staticmethod
    def is_default_device_order(shard_order: tuple[ShardOrderEntry, ...] | None) -> bool:
        """Whether the axes of each dim ascend; only files of later releases say otherwise."""
        return all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in shard_order or ())

    @staticmethod
    def compute_default_shard_order(placements: tuple[Placement, ...]) -> tuple[ShardOrderEntry, ...]:
        """The mesh axes that cut each dim, outer to inner."""
        cuts: dict[int, list[int]] = {}
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard) and not isinstance(placement, _StridedShard):
                cuts.setdefault(placement.dim, []).append(axis)
        return tuple(ShardOrderEntry(dim, tuple(axes)) for dim, axes in sorted(cuts.items()))


class _Replicate:
    """Never instantiated: its method is set on torch's placement."""

    def __getstate__(self: Replicate) -> dict[str, Any]:
        """Said in files, though empty: without it, later releases make a placement that isn't one, and crash."""
        return {}
