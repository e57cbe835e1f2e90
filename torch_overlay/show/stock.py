"""What torch's own steps take for a redistribution: its planner is asked, and its merging is counted. Nothing runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial
from torch.distributed.tensor import _redistribute as torch_redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from . import typed
from .shown_plan import JointAxes, Totals


def spec_on(
    mesh: typed.Mesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> DTensorSpec:
    """A spec on a mesh without process groups."""
    ranks = torch.tensor(mesh.ranks, dtype=torch.int, device="cpu").view(mesh.sizes)
    on = DeviceMesh(device, ranks, mesh_dim_names=mesh.names, _init_backend=False, _rank=mesh.ranks[0])
    strides = torch.empty(shape, device="meta").stride()
    return DTensorSpec(on, placements, tensor_meta=TensorMeta(torch.Size(shape), strides, dtype))


def totals(source: DTensorSpec, target: DTensorSpec, flattened: JointAxes) -> Totals:
    """What torch's steps take. It can merge those over axes that are `flattened`. Raises what its planner raises."""
    sizes, device = tuple(source.mesh.shape), source.mesh.device_type
    assert source.tensor_meta is not None
    # Of the first rank, which holds the most.
    shape = [*source.tensor_meta.shape]
    for size, placement in zip(sizes, source.placements):
        if (dim := _sharded(placement)) is not None:
            shape[dim] = -(-shape[dim] // size)
    infos = torch_redistribute._gen_transform_infos_non_cached(source, target)
    collectives = incoming = memory = 0
    own = 0  # elements beside the source that the steps before hold
    for run in _merged([info for info in infos if sizes[info.mesh_dim] > 1], sizes, flattened):
        kind, (old, new) = run[0]._comm_type_key(), map(_sharded, run[0].src_dst_placements)
        ranks, before = math.prod([sizes[info.mesh_dim] for info in run]), math.prod(shape)
        if old is not None:
            shape[old] = max(info.logical_shape[old] for info in run)
        if new is not None:
            shape[new] = -(-shape[new] // ranks)
        after = math.prod(shape)
        if kind is None:
            continue
        gathers = kind == "all_gather" or (kind == "all_to_all" and device == "cpu")  # gloo gathers, and cuts after
        collectives += 1
        incoming += (ranks - 1) * before if gathers else (2 if kind == "all_reduce" else 1) * _parts(before, ranks)
        memory = max(memory, own + (before * ranks if gathers else after))
        own = after
    itemsize = source.tensor_meta.dtype.itemsize
    return Totals(collectives, incoming * itemsize, memory * itemsize)


def _parts(elements: int, ranks: int) -> int:
    """The elements that the other ranks send of their parts."""
    return (ranks - 1) * -(-elements // ranks)


def _sharded(placement: Any) -> int | None:
    dim: int | None = getattr(placement, "dim", None)
    return dim


def _merged(infos: list[Any], sizes: tuple[int, ...], flattened: JointAxes) -> Iterator[list[Any]]:
    """The transforms, together where torch makes one collective of several."""
    for _, group in itertools.groupby(infos, _alike):
        run = [*group]
        axes, kind = [info.mesh_dim for info in run], run[0]._comm_type_key()
        dim, order = _sharded(run[0].src_dst_placements[1]), sorted(axes)
        in_order = {"all_reduce": True, "all_gather": axes == order[::-1], "reduce_scatter": axes == order}
        at_hand = flattened is None or tuple(order) in flattened
        longest = max(info.logical_shape[dim] for info in run) if dim is not None else 0
        even = kind != "reduce_scatter" or longest % math.prod([sizes[axis] for axis in axes]) == 0
        if in_order.get(kind, False) and at_hand and even:
            yield run
        else:
            yield from ([info] for info in run)


def _alike(info: Any) -> tuple[Any, Any]:
    """What torch's transforms must have in common to be merged: it sums averages, too."""
    source, target = info.src_dst_placements
    averages = type(source) is Partial and source.reduce_op == "avg"
    return Partial("sum") if averages else source, target
