"""Distribute whole tensors as strided shards that don't divide evenly, as FSDP2 x TP has them.

Torch scatters along the axes in the order of the mesh, and its scatter along the first one refuses strided shards of
different lengths. In the order in which such shards are cut, tensor parallelism first, each axis is a `torch.chunk`.

FSDP2 holds a chunk of a chunk. For some lengths torch reads something else from the placements: 9 rows on a mesh of
(4, 2) are cut into 5 and 4, of which the last ranks along the first axis have 0 and 1; torch reads 1 and 0. Then
`distribute_tensor` calls torch's function.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as _DeviceMesh
from torch.distributed.device_mesh import _mesh_resources
from torch.distributed.tensor import _api
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from ..distributed import config
from ..distributed._mesh.caches import real_mesh
from ..distributed._mesh.state import group_names
from ..distributed._torch import original
from ..distributed.tensor._planner.boxes import chunk
from ..distributed.tensor._planner.regions import NotPlanned, Regions
from ..distributed.tensor._runner.at_hand import wrong_order
from ..distributed.tensor._runner.question import stands_for_many_ranks
from ..distributed.tensor._runner.specs import read_cuts
from ..patching.trampoline import swap_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from ..transfers.trees import Placements

as_torch_does = original(_api, "distribute_tensor")


def install_distribute() -> Any:
    """Swap the code of torch's `distribute_tensor`, also for modules that imported it. Returns torch's code."""
    return swap_code(_api.distribute_tensor, distribute_tensor)


def uninstall_distribute(code: Any) -> None:
    _api.distribute_tensor.__code__ = code


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Any] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """As torch's, with the same errors, also for strided shards that don't divide evenly. Collective, unless
    `src_data_rank` is None."""
    if src_data_rank is not None:
        _check_order(device_mesh or _mesh_resources.get_current_mesh())
    if _StridedShard in map(type, placements or ()) and src_data_rank is not None:
        mesh = device_mesh or _mesh_resources.get_current_mesh()
        uneven = uneven_strides(tensor, mesh, tuple(placements or ()))
        if uneven is not None and all(map(_torch_reads_chunks, [uneven] * tensor.ndim, range(tensor.ndim))):
            return scattered(tensor, mesh, tuple(placements or ()), uneven, src_data_rank)
    return as_torch_does(tensor, device_mesh, placements, src_data_rank=src_data_rank)  # type: ignore[no-any-return]


def _check_order(mesh: DeviceMesh) -> None:
    """Raise if torch would scatter shards of this mesh to the wrong ranks, see `wrong_order`."""
    mesh = real_mesh(mesh)
    # Without plans, what torch scatters it also gathers, in one order. A mesh of one process for many has no rank.
    if not config.plan_redistribution or type(mesh) is not _DeviceMesh or not group_names(mesh):
        return
    wrong = None if not dist.is_initialized() or stands_for_many_ranks(mesh) else wrong_order(mesh)
    if wrong is not None:
        raise RuntimeError(wrong)


def uneven_strides(whole: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> Regions | None:
    """Return the regions of a tensor whose strided shards don't divide evenly. None for any other, which torch
    distributes or refuses, and on a rank outside of the mesh."""
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
    """Scatter along one axis after the other, outer cuts first, and broadcast to replicas. Collective over the mesh."""
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
    """True if torch reads the strided shards of a dim as chunks of chunks: the same for some lengths only."""
    order = held.orders[dim]
    if list(order) == sorted(order):
        return True
    if len(order) != 2:
        return False
    outer, inner = held.sizes[order[0]], held.sizes[order[1]]
    lengths = [chunk(held.shape[dim], outer, place)[1] for place in range(outer)]
    for part in range(inner):
        own = [chunk(length, inner, part)[1] for length in lengths]
        if own != [chunk(sum(own), outer, place)[1] for place in range(outer)]:
            return False
    return True
