"""`redistribute`: a tensor, or a tree of them, with other placements, on the same mesh or on another.

Pending reductions of a tree are reduced first, one tensor at a time, each on its own mesh.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_group, is_initialized
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import TensorMeta

from ..distributed.tensor._redistribute import redistribute_local_tensor
from .mesh_moves import Change, batches, change_meshes, change_together, made_like, read_change
from .pieces import settled
from .sharding import Meshes, regions_of, regions_on
from .team import is_gloo
from .trees import Placements, leaves, mapped, target_placements

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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
        if (
            dtype not in _ON_GLOO
            and is_initialized()
            and is_gloo(_get_default_group(), torch.device(tensor.device_mesh.device_type))
        ):
            return "gloo has no reductions of this type"
    return None


Target = tuple[DeviceMesh, Placements]


# Dynamo compiles a function that is called after a graph break as a frame of its own, with stand-ins for meshes and
# placements: of a compiled `x.redistribute(another_mesh)` that was an InternalTorchDynamoError, here or further down.
@torch.compiler.disable(reason="torch_overlay plans and runs a redistribution to another mesh outside of the graph")
def redistribute(tensors: Any, device_mesh: DeviceMesh | None = None, placements: Any = None, *, budget: int) -> Any:
    """See `torch_overlay.redistribute`."""
    found = {name: leaf for name, leaf in leaves(tensors).items() if isinstance(leaf, DTensor)}
    wanted = target_placements(found, placements, device_mesh)
    changed = [name for name, tensor in found.items() if (tensor.device_mesh, tensor.placements) != wanted[name]]
    if changed:
        sources, targets = [found[name] for name in changed], [wanted[name] for name in changed]
        found |= zip(changed, _Redistribute.apply(targets, budget, changed, *sources))
    return mapped(lambda name, leaf: found.get(name, leaf), tensors)


class _Redistribute(torch.autograd.Function):
    """All tensors at once, so that their gradients come back at once: those of a loop over them.

    A result wants a gradient if its tensor does, and one that nobody uses brings none back.
    """

    @staticmethod
    def forward(
        ctx: Any, targets: Sequence[Target], budget: int, names: Sequence[str], *tensors: DTensor
    ) -> tuple[DTensor, ...]:
        ctx.budget, ctx.names = budget, names
        ctx.sources = [(tensor.device_mesh, tensor.placements) for tensor in tensors]
        ctx.strides = [tensor.stride() for tensor in tensors]
        ctx.set_materialize_grads(False)
        found = tuple(_moved(tensors, targets, budget, names))
        ctx.mark_non_differentiable(*[made for made, tensor in zip(found, tensors) if not tensor.requires_grad])
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor | None) -> tuple[Any, ...]:
        found: list[Any] = [None] * len(gradients)
        wanted = ctx.needs_input_grad[-len(gradients) :]
        there = [number for number, gradient in enumerate(gradients) if gradient is not None and wanted[number]]
        targets = []
        for number in there:
            mesh, placements = ctx.sources[number]
            # The gradient of a term of a sum is the gradient of the sum.
            targets.append((mesh, tuple([Replicate() if p.is_partial() else p for p in placements])))
        names = [f"the gradient of {ctx.names[number]}" for number in there]
        moved = _Redistribute.apply(targets, ctx.budget, names, *[gradients[number] for number in there])
        for number, gradient in zip(there, moved):
            # A rank outside of the mesh has nothing to accumulate, and torch can't add up nothing.
            if gradient.device_mesh.get_coordinate() is not None:
                found[number] = _with_stride(gradient, ctx.strides[number])
        return None, None, None, *found


def _with_stride(gradient: DTensor, stride: tuple[int, ...]) -> DTensor:
    """The gradient with the strides of what it is for. On a rank that held nothing of the result they are none, so that
    torch would copy the gradient there and keep it elsewhere; and before 2.12 copying uneven shards communicates."""
    if gradient.stride() == stride or gradient.requires_grad:
        return gradient
    spec = copy(gradient._spec)
    spec.tensor_meta = TensorMeta(gradient.shape, stride, gradient.dtype)
    return DTensor(gradient._local_tensor, spec, requires_grad=False)


def _moved(tensors: Sequence[DTensor], targets: Sequence[Target], budget: int, names: Sequence[str]) -> list[DTensor]:
    """The new tensors, in order: those that change their mesh together, and those on one mesh as far as its
    groups allow."""
    found: dict[int, DTensor] = {}
    across: list[int] = []
    together: dict[tuple[DeviceMesh, torch.device], dict[int, Change]] = {}
    for number, (tensor, (mesh, placements)) in enumerate(zip(tensors, targets)):
        change = read_change(tensor, placements, names[number]) if mesh == tensor.device_mesh else None
        if mesh != tensor.device_mesh:
            across.append(number)
        elif change is not None:
            together.setdefault((mesh, tensor._local_tensor.device), {})[number] = change
        elif is_pending(tensor) and not any(placement.is_partial() for placement in placements):
            found[number] = reduce_on_its_mesh(tensor, placements)
        else:
            found[number] = tensor.redistribute(mesh, placements)
    for batch in _batches_across(tensors, across, budget):
        some = [[each[number] for number in batch] for each in (targets, names)]
        found |= zip(batch, change_meshes([*batch.values()], some[0], budget, some[1]))  # type: ignore[arg-type]
    for (mesh, _), changes in together.items():
        found |= _on_one_mesh(mesh, changes, budget)
    return [found[number] for number in range(len(tensors))]


def _batches_across(tensors: Sequence[DTensor], numbers: Sequence[int], budget: int) -> Iterator[dict[int, DTensor]]:
    """Those that go to another mesh together, by number, nothing pending any more; the same on all ranks.

    Results of reductions take no more than the budget, or one of them. All that isn't pending goes with the last ones.

    Raises:
        ValueError, NotPlanned: a tensor's terms can't be reduced; on ranks that only receive it, too.
    """
    meshes = Meshes()
    for tensor in filter(is_pending, [tensors[number] for number in numbers]):
        regions_of("the tensor", tensor, meshes)  # NotPlanned, if its operation alone doesn't end it
        why = irreducible(tensor)
        if why is not None:
            raise ValueError(f"A tensor of {tensor.dtype} with {tensor.placements} can't change its mesh: {why}.")
    batch: dict[int, DTensor] = {}
    held = 0
    for number in sorted(numbers, key=lambda number: not is_pending(tensors[number])):
        tensor = tensors[number]
        if is_pending(tensor):
            placements, sizes = reduced_placements(tensor), tuple(tensor.device_mesh.shape)
            size = regions_on(placements, None, tuple(tensor.shape), sizes).most * tensor.dtype.itemsize
            if batch and held + size > budget:
                yield batch
                batch, held = {}, 0
            tensor = reduce_on_its_mesh(tensor, placements)
            held += size
        batch[number] = tensor
    if batch:
        yield batch


def _on_one_mesh(mesh: DeviceMesh, changes: dict[int, Change], budget: int) -> dict[int, DTensor]:
    found: dict[int, DTensor] = {}
    together, alone = batches(mesh, changes)
    for numbers in together:
        some = [changes[number] for number in numbers]
        for number, change, local in zip(numbers, some, change_together(mesh, some, budget)):
            found[number] = made_like(change.tensor, local, mesh, change.placements)
    for number in alone:  # step by step
        found[number] = changes[number].tensor.redistribute(mesh, changes[number].placements)
    return found
