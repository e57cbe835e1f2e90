"""`redistribute`: give a tensor, or a tree of tensors, other placements, on the same mesh or on another.

Pending reductions are reduced first, one tensor at a time, each on its own mesh. Start at `redistribute` and `_moved`.
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
from ..rendezvous.team import is_gloo, kept_group
from ..transfer import Transfer
from .mesh_moves import Change, batches, change_meshes, change_together, dtensor_like, read_change
from .pieces import lengths_of, runs_at, settled, strided_cuts
from .sharding import Meshes, regions_of, regions_on
from .trees import Placements, leaves, mapped, target_placements

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


# The dtypes that gloo can reduce.
_ON_GLOO = (
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)


def is_pending(tensor: DTensor) -> bool:
    """True if ranks of the tensor's mesh hold terms of a reduction that is still to be done."""
    return any(placement.is_partial() for placement in tensor.placements)


def reduced_placements(tensor: DTensor) -> Placements:
    """Choose the placements in which a pending tensor is reduced on its mesh.

    A pending axis shards the longest dim that no other axis shards, so that a reduce-scatter is enough and each rank
    sends on its own part only. If no dim is long enough, the axis replicates.
    """
    placements = list(tensor.placements)
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            sharded = {getattr(other, "dim", None) for other in placements}
            dims = [dim for dim in range(tensor.ndim) if dim not in sharded]
            longest = max(dims, key=lambda dim: tensor.shape[dim], default=None)
            parts = tensor.device_mesh.size(axis)
            placements[axis] = Replicate() if longest is None or tensor.shape[longest] < parts else Shard(longest)
    return tuple(placements)


def reduce_on_its_mesh(tensor: DTensor, placements: Placements) -> DTensor:
    """Redistribute a pending tensor on its own mesh, by the overlay's plan, whether the overlay is enabled or not.
    Collective over the mesh; a rank outside of it only gets the result's DTensor.

    Terms of an average are divided before they are added up: four float16 of 60,000 would sum to infinity. They are
    divided by a power of two, which is exact except for subnormal numbers, and the sum by what is left, which rounds
    once.
    """
    mesh, local, terms = tensor.device_mesh, tensor._local_tensor, list(tensor.placements)
    result = dtensor_like(tensor, local, mesh, placements)
    if mesh.get_coordinate() is None:
        return result
    early, late = 1, 1.0
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        for axis, placement in enumerate(terms):
            if type(placement) is Partial and placement.reduce_op == "avg":
                power = 1 << (mesh.size(axis) - 1).bit_length()  # not less than the number of ranks
                early, late, terms[axis] = early * power, late * mesh.size(axis) / power, Partial("sum")
    before = dtensor_like(tensor, _divided(local, early), mesh, tuple(terms))
    local = redistribute_local_tensor(before._local_tensor, before._spec, result._spec)
    # torch's step-by-step path divides integers for an average, which makes them floats.
    return dtensor_like(tensor, _divided(local.to(tensor.dtype), late), mesh, placements)


def _divided(local: torch.Tensor, by: float) -> torch.Tensor:
    """Divide a local tensor by a number."""
    if by == 1:
        return local
    local = settled(local)
    return torch.view_as_complex(torch.view_as_real(local) / by) if local.is_complex() else local / by


def irreducible(tensor: DTensor) -> str | None:
    """Say why the terms of a pending tensor can't be reduced, in words; None if they can.

    It says what torch refuses on the ranks that reduce. All ranks ask, since ranks that only receive would otherwise
    wait for the ranks that raised.
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
    """Redistribute the DTensors of a tree, and return a tree with the new ones. Collective.

    Arguments and errors are those of `torch_overlay.redistribute`. DTensors that have their mesh and placements already
    stay as they are.
    """
    by_name = {name: leaf for name, leaf in leaves(tensors).items() if isinstance(leaf, DTensor)}
    wanted = target_placements(by_name, placements, device_mesh)
    changed = [name for name, tensor in by_name.items() if (tensor.device_mesh, tensor.placements) != wanted[name]]
    if changed:
        sources, targets = [by_name[name] for name in changed], [wanted[name] for name in changed]
        by_name |= zip(changed, _Redistribute.apply(targets, budget, changed, *sources))
    return mapped(lambda name, leaf: by_name.get(name, leaf), tensors)


class _Redistribute(torch.autograd.Function):
    """Redistributes all tensors together, so that their gradients come back together, with the values that a loop over
    the tensors would give.

    A result requires a gradient if its tensor does. A result that isn't used brings no gradient back.
    """

    @staticmethod
    def forward(
        ctx: Any, targets: Sequence[Target], budget: int, names: Sequence[str], *tensors: DTensor
    ) -> tuple[DTensor, ...]:
        """Redistribute the tensors to their targets. Collective."""
        ctx.budget, ctx.names = budget, names
        ctx.sources = [(tensor.device_mesh, tensor.placements) for tensor in tensors]
        ctx.strides = [tensor.stride() for tensor in tensors]
        ctx.set_materialize_grads(False)
        results = tuple(_moved(tensors, targets, budget, names))
        ctx.mark_non_differentiable(*[result for result, tensor in zip(results, tensors) if not tensor.requires_grad])
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor | None) -> tuple[Any, ...]:
        """Redistribute the gradients back to the meshes and placements of the tensors. Collective."""
        results: list[Any] = [None] * len(gradients)
        wanted = ctx.needs_input_grad[-len(gradients) :]
        present = [number for number, gradient in enumerate(gradients) if gradient is not None and wanted[number]]
        targets = []
        for number in present:
            mesh, placements = ctx.sources[number]
            # The gradient of each term of a sum is the gradient of the sum.
            targets.append((mesh, tuple([Replicate() if p.is_partial() else p for p in placements])))
        names = [f"the gradient of {ctx.names[number]}" for number in present]
        moved = _Redistribute.apply(targets, ctx.budget, names, *[gradients[number] for number in present])
        for number, gradient in zip(present, moved):
            # A rank outside of the mesh has nothing to accumulate, and torch can't add up empty local tensors there.
            if gradient.device_mesh.get_coordinate() is not None:
                results[number] = _with_stride(gradient, ctx.strides[number])
        return None, None, None, *results


def _with_stride(gradient: DTensor, stride: tuple[int, ...]) -> DTensor:
    """Return the gradient with the strides of the tensor to which it belongs.

    On a rank that held nothing of the result, the gradient has other strides. torch would copy it on that rank alone,
    and before 2.12 copying uneven shards communicates.
    """
    if gradient.stride() == stride or gradient.requires_grad:
        return gradient
    spec = copy(gradient._spec)
    spec.tensor_meta = TensorMeta(gradient.shape, stride, gradient.dtype)
    return DTensor(gradient._local_tensor, spec, requires_grad=False)


def _moved(tensors: Sequence[DTensor], targets: Sequence[Target], budget: int, names: Sequence[str]) -> list[DTensor]:
    """Redistribute all tensors, and return the new ones in order. Collective."""
    results: dict[int, DTensor] = {}
    across: list[int] = []
    in_boxes: dict[int, DTensor] = {}
    together: dict[tuple[DeviceMesh, torch.device], dict[int, Change]] = {}
    for number, (tensor, (mesh, placements)) in enumerate(zip(tensors, targets)):
        change = read_change(tensor, placements, names[number]) if mesh == tensor.device_mesh else None
        if mesh != tensor.device_mesh:
            if has_several_boxes(tensor, mesh, placements):
                in_boxes[number] = tensor
            else:
                across.append(number)
        elif change is not None:
            together.setdefault((mesh, tensor._local_tensor.device), {})[number] = change
        elif is_pending(tensor) and not any(placement.is_partial() for placement in placements):
            results[number] = reduce_on_its_mesh(tensor, placements)
        else:
            results[number] = tensor.redistribute(mesh, placements)
    for batch in _batches_across(tensors, across, budget):
        batch_targets, batch_names = [targets[number] for number in batch], [names[number] for number in batch]
        results |= zip(batch, change_meshes([*batch.values()], batch_targets, budget, batch_names))
    if in_boxes:
        results |= _by_transfer(in_boxes, [targets[number] for number in in_boxes], budget, names)
    for (mesh, _), changes in together.items():
        results |= _on_one_mesh(mesh, changes, budget)
    return [results[number] for number in range(len(tensors))]


def has_several_boxes(tensor: DTensor, mesh: DeviceMesh, placements: Placements) -> bool:
    """True if ranks hold several boxes of a tensor, before or after it gets this mesh and these placements."""
    target = dtensor_like(tensor, tensor._local_tensor, mesh, placements)
    return any(strided_cuts(each._spec, "a tensor to redistribute") is not None for each in (tensor, target))


def _by_transfer(
    tensors: dict[int, DTensor], targets: Sequence[Target], budget: int, names: Sequence[str]
) -> dict[int, DTensor]:
    """Redistribute tensors to other meshes as a Transfer moves them, made for this call. Collective over the ranks of
    all meshes. Returns the new tensors by number."""
    results = {}
    for (number, tensor), (mesh, placements) in zip(tensors.items(), targets):
        result = dtensor_like(tensor, tensor._local_tensor, mesh, placements)
        shape, coordinate = tuple(tensor.shape), mesh.get_coordinate()
        cuts = strided_cuts(result._spec, repr(names[number]))
        if coordinate is None:
            length: tuple[int, ...] = (0,) * max(tensor.ndim, 1)
        elif cuts is None:
            length = regions_on(placements, None, shape, tuple(mesh.shape)).box(coordinate).length
        else:
            length = lengths_of(runs_at(cuts, shape, coordinate))
        result._local_tensor = tensor._local_tensor.new_empty(length, requires_grad=False)
        results[number] = result
    meshes = {each.device_mesh for each in (*tensors.values(), *results.values())}
    ranks = sorted({rank for mesh in meshes for rank in Meshes().view(mesh).ranks})
    sides = [{names[number]: each for number, each in side.items()} for side in (tensors, results)]
    with Transfer(*sides, budget=budget, group=kept_group(ranks)) as transfer:
        transfer.run()
    return results


def _batches_across(tensors: Sequence[DTensor], numbers: Sequence[int], budget: int) -> Iterator[dict[int, DTensor]]:
    """Yield the tensors that move to other meshes together, by number, after reducing those that are pending.
    Collective over the meshes of pending ones.

    A batch has at most `budget` bytes of results of reductions, or one result. Batches are the same on all ranks.
    """
    meshes = Meshes()
    for tensor in filter(is_pending, [tensors[number] for number in numbers]):
        regions_of("the tensor", tensor, meshes)  # raises NotPlanned for a subclass of Partial
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
    """Redistribute tensors on one mesh, and return the new ones by number. Collective."""
    results: dict[int, DTensor] = {}
    together, alone = batches(mesh, changes)
    for numbers in together:
        batch = [changes[number] for number in numbers]
        for number, change, local in zip(numbers, batch, change_together(mesh, batch, budget, is_compared=True)):
            results[number] = dtensor_like(change.tensor, local, mesh, change.placements)
    for number in alone:  # no process group spans all their axes: torch goes along one axis after the other
        results[number] = changes[number].tensor.redistribute(mesh, changes[number].placements)
    return results
