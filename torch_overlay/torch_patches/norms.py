"""Norms of gradients on several meshes, as those of dense layers and of experts are, or on no mesh.

Torch stacks the norms of all gradients, which works on one mesh only. Here the norms of each mesh are reduced by
themselves, in one all-reduce a mesh, and the total is a plain tensor, the same on all ranks. A plain gradient beside
them is the same on all ranks, too, and counts once. If all gradients are on one mesh, torch's own function runs: it
stacks pending norms, so that one all-reduce is enough.

torch wraps the functions that it calls here, and the wrapped function is in the wrapper's closure. It is replaced
there, so that the wrapper keeps its identity under every name. Importing this imports no DTensor: a program that clips
gradients may have none.
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

NAME = "func"  # the name that torch's decorator has for the function that it wraps


def _cell(wrapper: Any) -> CellType:
    """Return the closure cell in which a wrapper of torch's has the function that it calls."""
    return dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))[NAME]


one_norm: Callable[..., torch.Tensor] = _cell(clip_grad._get_total_norm).cell_contents
scale_one: Callable[..., None] = _cell(clip_grad._clip_grads_with_norm_).cell_contents


def install_norm() -> None:
    _cell(clip_grad._get_total_norm).cell_contents = total_norm


def uninstall_norm(_: None) -> None:
    _cell(clip_grad._get_total_norm).cell_contents = one_norm


def install_clip() -> None:
    _cell(clip_grad._clip_grads_with_norm_).cell_contents = clip_with_norm


def uninstall_clip(_: None) -> None:
    _cell(clip_grad._clip_grads_with_norm_).cell_contents = scale_one


def total_norm(
    tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """As torch's `_get_total_norm`; a plain tensor for DTensors on several meshes, or beside plain tensors.
    Collective."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    norm_type = float(norm_type)
    by_mesh = _by_mesh(tensors, tensors)
    for mesh, on_mesh in by_mesh.items():
        if mesh is not None:
            by_mesh[mesh] = [_reduced(tensor, norm_type) for tensor in on_mesh]
    if len(by_mesh) < 2:
        return one_norm(*(by_mesh.values() or [tensors]), norm_type, error_if_nonfinite, foreach)
    norms: list[Any] = [one_norm(on_mesh, norm_type, False, foreach) for on_mesh in by_mesh.values()]
    norms = [norm if mesh is None else norm.full_tensor() for mesh, norm in zip(by_mesh, norms)]
    # The norm of order 0 counts the tensors that aren't zero, so those of several meshes are added: order 1.
    return one_norm(norms, norm_type or 1.0, error_if_nonfinite, foreach)


def clip_with_norm(parameters: Any, max_norm: float, total_norm: Any, foreach: bool | None = None) -> None:
    """As torch's `_clip_grads_with_norm_`: scale all gradients in place, so that their norm is at most `max_norm`.
    Collective if `total_norm` is a DTensor and some gradients are elsewhere."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    by_mesh = _by_mesh([parameter.grad for parameter in parameters], parameters)
    home = _mesh_of(total_norm)
    if home is not None and any(mesh != home for mesh in by_mesh):
        total_norm = total_norm.full_tensor()
    for on_mesh in by_mesh.values():
        scale_one(on_mesh, max_norm, total_norm, foreach)


def _mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    return getattr(tensor, "device_mesh", None)


def _by_mesh(tensors: Iterable[torch.Tensor], values: Iterable[Any]) -> dict[DeviceMesh | None, list[Any]]:
    """Values by the mesh of the tensor to which each belongs."""
    grouped: dict[DeviceMesh | None, list[Any]] = {}
    for tensor, value in zip(tensors, values):
        grouped.setdefault(_mesh_of(tensor), []).append(value)
    return grouped


def _reduced(tensor: Any, norm_type: float) -> Any:
    """Return a DTensor of the same norm that isn't pending, whose shards have a norm on every rank: each rank gives its
    own shard's as one element, an empty shard one that changes no extreme. Collective if it is pending."""
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
    """Make a DTensor from one element of each rank, sharded where `tensor` is and replicated where it is."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = tensor.device_mesh
    cut = [not placement.is_replicate() for placement in tensor.placements]
    length = math.prod([mesh.size(axis) for axis, is_cut in enumerate(cut) if is_cut])
    placements = [Shard(0) if is_cut else Replicate() for is_cut in cut]
    return DTensor.from_local(norm.reshape(1), mesh, placements, run_check=False, shape=(length,), stride=(1,))
