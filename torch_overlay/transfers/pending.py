"""Pending reductions in a tree that is redistributed: each tensor is reduced on its own mesh, before it moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.tensor import Partial, Replicate, Shard

from ..distributed.tensor._redistribute import redistribute_local_tensor
from .given import settled
from .two_meshes import made_like

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from .targets import Placements

_ON_GLOO = (
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)


def is_pending(tensor: DTensor) -> bool:
    """Whether ranks of its mesh hold terms that are yet to be reduced."""
    return any(placement.is_partial() for placement in tensor.placements)


def reduced_placements(tensor: DTensor) -> Placements:
    """How a tensor lies when it is reduced: a pending axis cuts the longest dim that no other axis cuts, so that each
    rank keeps its own part and none sends the whole; where no dim is long enough, all ranks have all of it."""
    found = list(tensor.placements)
    for axis, placement in enumerate(found):
        if placement.is_partial():
            cut = {getattr(other, "dim", None) for other in found}
            dims = [dim for dim in range(tensor.ndim) if dim not in cut]
            longest = max(dims, key=lambda dim: tensor.shape[dim], default=None)
            parts = tensor.device_mesh.size(axis)
            found[axis] = Replicate() if longest is None or tensor.shape[longest] < parts else Shard(longest)
    return tuple(found)


def reduce_on_its_mesh(tensor: DTensor, placements: Placements) -> DTensor:
    """The tensor with placements of its own mesh, none of them pending, by one plan, whether the overlay is enabled or
    not. A rank outside of the mesh has no term.

    Terms of an average are divided before they are added up: four float16 of 60,000 would sum to infinity. Dividing by
    a power of two is exact (but for numbers too small to be normal), so that the rest of the division rounds once.
    """
    mesh, local, terms = tensor.device_mesh, tensor._local_tensor, list(tensor.placements)
    made = made_like(tensor, local, mesh, placements)
    if mesh.get_coordinate() is None:
        return made
    early, late = 1, 1.0
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        for axis, placement in enumerate(terms):
            if type(placement) is Partial and placement.reduce_op == "avg":
                power = 1 << (mesh.size(axis) - 1).bit_length()  # not less than the number of ranks
                early, late, terms[axis] = early * power, late * mesh.size(axis) / power, Partial("sum")
    before = made_like(tensor, _divided(local, early), mesh, tuple(terms))
    local = redistribute_local_tensor(before._local_tensor, before._spec, made._spec)
    # The step-by-step path divides for an average, also of whole numbers.
    return made_like(tensor, _divided(local.to(tensor.dtype), late), mesh, placements)


def _divided(local: torch.Tensor, by: float) -> torch.Tensor:
    """Complex numbers part by part: dividing an infinite one by a number would give NaN."""
    if by == 1:
        return local
    local = settled(local)
    return torch.view_as_complex(torch.view_as_real(local) / by) if local.is_complex() else local / by


def irreducible(tensor: DTensor) -> str | None:
    """Why ranks can't bring its terms together, in words; None if they can.

    It is what torch refuses on the ranks that reduce. Ranks that only receive would wait for them, so all ask here.
    """
    dtype = tensor.dtype
    is_inexact = dtype.is_floating_point or dtype.is_complex
    for placement in tensor.placements:
        if not placement.is_partial():
            continue
        op = placement.reduce_op
        if op == "avg" and not is_inexact:
            return "an average of whole numbers may be none"
        if op == "avg" and dtype.itemsize == 1:
            return "torch doesn't divide floats of eight bits"
        if op in ("band", "bor", "bxor") and is_inexact:
            return "only whole numbers are taken bit by bit"
        if dtype.is_complex and op not in ("sum", "avg"):
            return "complex numbers are only added"
        if dtype not in _ON_GLOO and _is_on_gloo(tensor.device_mesh.device_type):
            return "gloo has no reductions of this type"
    return None


def _is_on_gloo(device: str) -> bool:
    try:
        return bool(_get_default_group()._get_backend(torch.device(device)).name() == "gloo")
    except (RuntimeError, ValueError):  # no such backend, or no world
        return False
