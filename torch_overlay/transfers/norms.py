"""Norms of gradients that lie on several meshes, as those of dense layers and of experts do, or on none.

Torch stacks the norms of all gradients, which it can do on one mesh only. Here each mesh's are reduced by themselves,
in one all-reduce, and the total is a plain tensor, the same on all ranks. A plain gradient beside them is the same on
all ranks, too, and counts once. Gradients on one mesh go torch's own way: there the norms are pending when they are
stacked, so one all-reduce is enough.

The functions that torch calls are wrapped, and the wrapped one is found in the wrapper's closure. It is replaced there,
so that every name for the wrapper follows. Importing this imports no DTensor: a program that clips may have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import CellType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad

from .empty_shards import leaves_some_empty

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAME = "func"  # what torch's decorator calls the function that it wraps


def _cell(wrapper: Any) -> CellType:
    """Where a wrapper of torch's holds the function that it calls. Raises KeyError if it is no such wrapper."""
    return dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))[NAME]


one_norm: Callable[..., torch.Tensor] = _cell(clip_grad._get_total_norm).cell_contents
scale_one: Callable[..., None] = _cell(clip_grad._clip_grads_with_norm_).cell_contents


def norm_by_mesh() -> None:
    """Let torch's function take the norm of gradients on several meshes."""
    _cell(clip_grad._get_total_norm).cell_contents = total_norm


def norm_on_one_mesh(_: None) -> None:
    """Take it back."""
    _cell(clip_grad._get_total_norm).cell_contents = one_norm


def clip_by_mesh() -> None:
    """Let torch's function scale gradients on several meshes."""
    _cell(clip_grad._clip_grads_with_norm_).cell_contents = clip_with_norm


def clip_on_one_mesh(_: None) -> None:
    """Take it back."""
    _cell(clip_grad._clip_grads_with_norm_).cell_contents = scale_one


def total_norm(
    tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """As torch's; of DTensors on several meshes, or beside plain tensors, a plain tensor."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    norm_type = float(norm_type)
    by_mesh = _by_mesh(tensors, tensors)
    for mesh, some in by_mesh.items():
        if mesh is not None:
            by_mesh[mesh] = [_ready(each, norm_type) for each in some]
    if len(by_mesh) < 2:
        return one_norm(*(by_mesh.values() or [tensors]), norm_type, error_if_nonfinite, foreach)
    norms: list[Any] = [one_norm(some, norm_type, False, foreach) for some in by_mesh.values()]
    norms = [norm if mesh is None else norm.full_tensor() for mesh, norm in zip(by_mesh, norms)]
    # The norm of order 0 is how many tensors aren't zero, and these numbers are added.
    return one_norm(norms, norm_type or 1.0, error_if_nonfinite, foreach)


def clip_with_norm(parameters: Any, max_norm: float, total_norm: Any, foreach: bool | None = None) -> None:
    """As torch's."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    by_mesh = _by_mesh([parameter.grad for parameter in parameters], parameters)
    home = _mesh_of(total_norm)
    if home is not None and any(mesh != home for mesh in by_mesh):
        total_norm = total_norm.full_tensor()
    for some in by_mesh.values():
        scale_one(some, max_norm, total_norm, foreach)


def _mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    return getattr(tensor, "device_mesh", None)  # of a DTensor


def _by_mesh(tensors: Iterable[torch.Tensor], values: Iterable[Any]) -> dict[DeviceMesh | None, list[Any]]:
    """The values of the tensors on each mesh, in the order in which the meshes come; those of plain tensors by None."""
    found: dict[DeviceMesh | None, list[Any]] = {}
    for tensor, value in zip(tensors, values):
        found.setdefault(_mesh_of(tensor), []).append(value)
    return found


def _ready(tensor: Any, norm_type: float) -> Any:
    """A DTensor that isn't pending and has the same norm, which has a value on each rank.

    For an infinite order, or one below 0, an empty shard has none. Each rank then gives the norm of its shard as one
    element, an empty one the element that changes no least or greatest and adds nothing. That takes no collective, but
    a graph with an open size can't ask what is empty: there `empty_shards` makes the tensor whole.
    """
    from torch.distributed.tensor import Replicate

    if any(placement.is_partial() for placement in tensor.placements):
        tensor = tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
    if 0 <= norm_type < math.inf or torch.compiler.is_compiling() or not tensor.numel():
        return tensor
    if not any(leaves_some_empty(tensor._spec, dim, length) for dim, length in enumerate(tensor.shape)):
        return tensor
    local = tensor.to_local()
    if local.numel():
        norm = torch.linalg.vector_norm(local, norm_type)
    else:
        norm = local.new_full((), 0.0 if norm_type > 0 else math.inf)
    return _beside_one_another(norm, tensor)


def _beside_one_another(norm: torch.Tensor, tensor: Any) -> Any:
    """A DTensor of one dim, with one element of each rank that has another shard of `tensor`."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = tensor.device_mesh
    cut = [not placement.is_replicate() for placement in tensor.placements]
    length = math.prod([mesh.size(axis) for axis, is_cut in enumerate(cut) if is_cut])
    placements = [Shard(0) if is_cut else Replicate() for is_cut in cut]
    return DTensor.from_local(norm.reshape(1), mesh, placements, run_check=False, shape=(length,), stride=(1,))
