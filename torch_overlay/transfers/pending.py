"""Pending reductions are done before a transfer: joined by mesh, axes, operation and type, one all-reduce an axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from ..distributed.tensor._planner.regions import Regions

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # and divided
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def room(budget: int, regions: Iterable[tuple[Regions, int]]) -> int:
    """What of a budget is left for exchanges while the results of reductions are held: half of it at least.

    Args:
        regions: of all tensors, with the bytes of an element. All ranks get the same.
    """
    results = sum([each.most * itemsize for each, itemsize in regions if each.pending])
    return max(budget - results, budget // 2)


def reduced(tensors: Iterable[tuple[int, DTensor, Regions]]) -> dict[int, torch.Tensor]:
    """What each rank holds of these tensors when nothing is pending any more, by number; in memory of its own.

    All ranks of a mesh call it with the same tensors in the same order.
    """
    joined: dict[tuple[DeviceMesh, tuple[tuple[int, str], ...], torch.dtype], list[tuple[int, DTensor]]] = {}
    for number, tensor, regions in tensors:
        pending = tuple([(axis, op) for axis, op in enumerate(regions.partial) if op is not None])
        joined.setdefault((tensor.device_mesh, pending, tensor.dtype), []).append((number, tensor))
    found: dict[int, torch.Tensor] = {}
    for (mesh, pending, _), some in joined.items():
        locals_ = [tensor._local_tensor for _, tensor in some]
        flat = torch.cat([local.detach().reshape(-1) for local in locals_])
        for axis, op in pending:
            dist.all_reduce(flat, _OPS[op], group=mesh.get_group(axis))
            if op == "avg":
                flat /= mesh.size(axis)
        for (number, _), local, piece in zip(some, locals_, flat.split([local.numel() for local in locals_])):
            found[number] = piece.view(local.shape)
    return found
