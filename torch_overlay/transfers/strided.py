"""Distributing whole tensors as strided shards that are cut unevenly, as those of FSDP2 x TP.

Torch goes through the axes in the order of the mesh, and its scatter along the first one takes no strided shards of
unlike lengths. In the order in which such shards are cut, tensor parallelism first, each axis is a `torch.chunk`.

FSDP2 holds a chunk of a chunk. What torch reads from the placements is something else for some lengths: 9 rows on
(4, 2) are 5 and 4, and of these the last rank along the first axis has 0 and 1; torch reads 1 and 0. There
`distribute_tensor` is left to torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import _mesh_resources
from torch.distributed.tensor import _api
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from ..distributed._torch import original
from ..distributed.tensor._planner.regions import NotPlanned, Regions, chunk
from ..distributed.tensor._runner.specs import read_cuts
from ..patching.trampoline import swap_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from .trees import Placements

as_torch_does = original(_api, "distribute_tensor")


def distribute_by_chunks() -> Any:
    """Let torch's function make uneven strided shards, for all modules that hold it by name. Returns its code."""
    return swap_code(_api.distribute_tensor, distribute_tensor)


def distribute_by_axes(code: Any) -> None:
    """Take it back."""
    _api.distribute_tensor.__code__ = code


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Any] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """As torch's."""
    if _StridedShard in map(type, placements or ()) and src_data_rank is not None:
        mesh = device_mesh or _mesh_resources.get_current_mesh()
        uneven = uneven_strides(tensor, mesh, tuple(placements or ()))
        if uneven is not None and all(map(_torch_reads_chunks, [uneven] * tensor.ndim, range(tensor.ndim))):
            return scattered(tensor, mesh, tuple(placements or ()), uneven, src_data_rank)
    return as_torch_does(tensor, device_mesh, placements, src_data_rank=src_data_rank)  # type: ignore[no-any-return]


def uneven_strides(whole: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> Regions | None:
    """What each coordinate holds of a tensor that strided shards cut unevenly; None of any other tensor, which torch
    distributes by itself, or refuses."""
    sizes, shape = tuple(mesh.shape), tuple(whole.shape)
    if _StridedShard not in map(type, placements) or len(placements) != len(sizes) or mesh.get_coordinate() is None:
        return None
    if type(whole) not in (torch.Tensor, torch.nn.Parameter) or whole.is_meta or not whole.is_leaf:
        return None
    try:
        cuts = read_cuts(placements, None, len(shape), sizes)
    except NotPlanned:
        return None
    even = all(shape[dim] % math.prod([sizes[axis] for axis in cuts.orders[dim]]) == 0 for dim in cuts.reordered_dims)
    return None if even or any(cuts.partial) else Regions(shape, sizes, cuts.orders, cuts.partial)


def scattered(whole: torch.Tensor, mesh: DeviceMesh, placements: Placements, held: Regions, source: int) -> DTensor:
    """From the first ranks along one axis after the other, outer cuts first, then to the replicas."""
    local, replicas = whole.detach().to(mesh.device_type), {*range(mesh.ndim)} - held.sharded
    for dim, order in enumerate(held.orders):
        for axis in order:
            local = Shard(dim)._shard_tensor(local, mesh, axis, source)
    for axis in sorted(replicas):
        local = Replicate()._replicate_tensor(local, mesh, axis, source)
    meta = TensorMeta(whole.size(), whole.stride(), whole.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    return _api.DTensor(local.requires_grad_(whole.requires_grad), spec, requires_grad=whole.requires_grad)  # type: ignore


def _torch_reads_chunks(held: Regions, dim: int) -> bool:
    """Whether torch, too, reads a chunk of a chunk from a dim's strided shards. By it, a rank has its part of each
    chunk along the second axis, and what it has is chunked along the second axis."""
    order = held.orders[dim]
    if list(order) == sorted(order):
        return True
    if len(order) != 2:
        return False
    many, parts = held.sizes[order[0]], held.sizes[order[1]]
    lengths = [chunk(held.shape[dim], many, place)[1] for place in range(many)]
    for part in range(parts):
        mine = [chunk(length, parts, part)[1] for length in lengths]
        if mine != [chunk(sum(mine), many, place)[1] for place in range(many)]:
            return False
    return True
