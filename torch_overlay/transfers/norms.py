"""Norms of gradients that lie on several meshes, as those of dense layers and of experts do.

Torch stacks the norms of all gradients, which it can do on one mesh only. Here each mesh's are reduced by themselves,
in one all-reduce, and the total is a plain tensor, the same on all ranks. Gradients on one mesh go torch's own way:
there the norms are pending when they are stacked, so one all-reduce is enough.

The functions that torch calls are wrapped, and the wrapped one is found in the wrapper's closure. It is replaced there,
so that every name for the wrapper follows. Importing this imports no DTensor: a program that clips may have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CellType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad

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
    """As torch's; of DTensors on several meshes, a plain tensor."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    by_mesh = _by_mesh(tensors, tensors)
    if by_mesh is None:
        return one_norm(tensors, norm_type, error_if_nonfinite, foreach)
    norms: list[Any] = [one_norm(some, norm_type, False, foreach) for some in by_mesh]
    return one_norm([norm.full_tensor() for norm in norms], norm_type, error_if_nonfinite, foreach)


def clip_with_norm(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None) -> None:
    """As torch's."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    for some in _by_mesh([parameter.grad for parameter in parameters], parameters) or [parameters]:
        scale_one(some, max_norm, total_norm, foreach)


def _by_mesh(tensors: Iterable[torch.Tensor], values: Iterable[Any]) -> list[list[Any]] | None:
    """The values of the tensors on each mesh, in the order in which the meshes come; None if torch can do it at once,
    or doesn't."""
    found: dict[DeviceMesh, list[Any]] = {}
    for tensor, value in zip(tensors, values):
        mesh = getattr(tensor, "device_mesh", None)  # of a DTensor
        if mesh is None:
            return None
        found.setdefault(mesh, []).append(value)
    return list(found.values()) if len(found) > 1 else None
