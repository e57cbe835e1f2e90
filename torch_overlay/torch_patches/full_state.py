"""Full state dicts: gather all DTensors of a mesh in a few exchanges, where torch gathers one after the other.

This serves `get_model_state_dict(full_state_dict=True)` and FSDP's optimizer state. If only some ranks want the result,
as rank 0 does of an offloaded state, only these receive anything. What `set_model_state_dict` loads goes torch's own
way, except for strided shards that don't divide evenly, which torch would cut in another way than FSDP2 does, and for
those of which a rank holds several boxes. Start at `gather_state_dict`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import _state_dict_utils
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Replicate

from ..distributed._torch import original
from ..distributed.tensor._chunks import part_at
from ..patching.trampoline import swap_code
from ..transfers._planner.schedule import aligned
from ..transfers.mesh_moves import Change, batches, change_together, dtensor_like, ranks_along, read_change
from ..transfers.options import BUDGET
from ..transfers.pieces import lengths_of, require_lengths, runs_at, settled, strided_cuts
from ..transfers.sharding import Meshes, misfit
from .strided import scattered, uneven_strides

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed.tensor._chunks import Cut
    from ..distributed.tensor._planner.regions import Regions


WHOLE = 256 << 20  # at most so many bytes of whole tensors are on the device before they are offloaded

# torch's own functions, which do what is left.
one_by_one = original(_state_dict_utils, "_gather_state_dict")
scatter_rest = original(_state_dict_utils, "_distribute_state_dict")
cut_rest = original(_state_dict_utils, "_distribute_tensors")


def install_gather() -> Any:
    """Swap the code of torch's `_gather_state_dict`, also for modules that imported it. Returns torch's code."""
    return swap_code(_state_dict_utils._gather_state_dict, gather_state_dict)


def uninstall_gather(code: Any) -> None:
    _state_dict_utils._gather_state_dict.__code__ = code


def install_scatter() -> Any:
    """Swap the code of torch's `_distribute_state_dict`. Returns torch's code."""
    return swap_code(_state_dict_utils._distribute_state_dict, scatter_state_dict)


def uninstall_scatter(code: Any) -> None:
    _state_dict_utils._distribute_state_dict.__code__ = code


def install_cut() -> Any:
    """Swap the code of torch's `_distribute_tensors`. Returns torch's code."""
    return swap_code(_state_dict_utils._distribute_tensors, cut_tensors)


def uninstall_cut(code: Any) -> None:
    _state_dict_utils._distribute_tensors.__code__ = code


def scatter_state_dict(
    full_state_dict: dict[str, Any], local_state_dict: dict[str, Any], device: torch.device, pg: Any = None
) -> None:
    """As torch's `_distribute_state_dict`: write this rank's parts of whole tensors, which all ranks give, into
    `local_state_dict`; strided shards that don't divide evenly are cut here. Collective."""
    rest, meshes = {}, Meshes()
    for key, value in full_state_dict.items():
        tensor: Any = local_state_dict.get(key)
        held = _uneven_regions(tensor, value, meshes)
        if held is not None:
            local_state_dict[key] = scattered(value.detach(), tensor.device_mesh, tensor.placements, held, 0)
        elif (part := _boxes_of(tensor, value)) is not None:
            local_state_dict[key] = dtensor_like(
                tensor, part.detach().to(device), tensor.device_mesh, tensor.placements
            )
        else:
            rest[key] = value
    scatter_rest(rest, local_state_dict, device, pg)


def cut_tensors(local_state_dict: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None) -> None:
    """As torch's `_distribute_tensors`: replace each pair of a local tensor and the whole one by the local tensor with
    this rank's part in it. Strided shards that are uneven, or several boxes on a rank, are cut here."""
    meshes = Meshes()
    for key in keys:
        pair: Any = local_state_dict.get(key)
        part = _part_of(pair[0], pair[1], meshes) if isinstance(pair, tuple) else None
        if part is None:
            continue
        tensor = pair[0]
        if tensor.is_meta:
            meta = TensorMeta(tensor.shape, tensor.stride(), part.dtype)
            spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
            tensor = DTensor(part.detach().clone(), spec, requires_grad=False)
        else:
            tensor.to_local().copy_(part)
        local_state_dict[key] = tensor
    cut_rest(local_state_dict, keys, device, pg)


def _part_of(tensor: Any, whole: Any, meshes: Meshes) -> torch.Tensor | None:
    """Return this rank's part of a whole tensor, of a strided shard that torch would cut in another way; else None."""
    held = _uneven_regions(tensor, whole, meshes)
    if held is None:
        return _boxes_of(tensor, whole)
    part: torch.Tensor = whole
    for dim, (start, length) in enumerate(zip(*held.box(tensor.device_mesh.get_coordinate()))):
        part = part.narrow(dim, start, length)
    return part


def _boxes_of(tensor: Any, whole: Any) -> torch.Tensor | None:
    """Return this rank's part if it is several boxes by `strided_cuts`: torch scatters such shards only if they are
    even."""
    if not isinstance(tensor, DTensor) or not isinstance(whole, torch.Tensor) or whole.shape != tensor.shape:
        return None
    cuts, coordinate = strided_cuts(tensor._spec, "a tensor to load"), tensor.device_mesh.get_coordinate()
    if cuts is None or coordinate is None:
        return None
    runs = runs_at(cuts, tuple(tensor.shape), coordinate)
    require_lengths(tensor, runs, "a tensor to load")
    return part_at(whole, runs)


def _uneven_regions(tensor: Any, whole: Any, meshes: Meshes) -> Regions | None:
    """Which coordinate holds which box of a tensor that has strided shards which don't divide evenly."""
    if not isinstance(tensor, DTensor) or not isinstance(whole, torch.Tensor) or whole.shape != tensor.shape:
        return None
    held = uneven_strides(whole, tensor.device_mesh, tensor.placements)
    wrong = held and misfit("a tensor to load", tensor, held, meshes)
    if wrong:
        raise ValueError(f"A full state dict can't be loaded: {wrong}.")
    return held


def gather_state_dict(state_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
    """As torch's `_gather_state_dict`, with the same results on the same ranks. Collective. DTensors that can move
    together are gathered in exchanges, those of several boxes one by one, and torch's function does what is left."""
    offloads = bool(options.get("cpu_offload"))
    # With another group than the default one, the ranks of a mesh may each give another one, and would not agree.
    agreed = options.get("pg") in (None, dist.group.WORLD)
    receivers = frozenset(options.get("ranks_only") or () if agreed else ())
    wholes: dict[int, torch.Tensor] = {}
    for batch in _batches(list(_dtensors(state_dict)), offloads):
        wholes |= _gathered(batch, receivers, offloads)
    for number, tensor in enumerate(_dtensors(state_dict)):
        cuts = None if number in wholes or _wants_gradient(tensor) else strided_cuts(tensor._spec, "a tensor to gather")
        if cuts is not None and tensor.device_mesh.get_coordinate() is not None:
            whole = _joined(tensor, cuts)
            wholes[number] = whole.cpu() if offloads else whole
    if not wholes:
        return one_by_one(state_dict, **options)  # type: ignore[no-any-return]
    return one_by_one(_with_wholes(state_dict, iter(range(1 << 62)), wholes), **options)  # type: ignore[no-any-return]


def _dtensors(tree: Any) -> Iterator[DTensor]:
    """Yield the DTensors of a state dict, in the order in which torch's function visits them."""
    if isinstance(tree, DTensor):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _dtensors(part)


def _with_wholes(tree: Any, numbers: Iterator[int], wholes: dict[int, torch.Tensor]) -> Any:
    """Copy a state dict without its tensors; each DTensor takes the next number, and `wholes[number]` if given."""
    if isinstance(tree, DTensor):
        return wholes.get(next(numbers), tree)
    if isinstance(tree, dict):
        return {key: _with_wholes(part, numbers, wholes) for key, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        parts = [_with_wholes(part, numbers, wholes) for part in tree]
        return tuple(parts) if isinstance(tree, tuple) else parts
    return tree


Batch = list[tuple[int, DTensor, Change]]


def _batches(tensors: Sequence[DTensor], offloads: bool) -> Iterator[Batch]:
    """Yield lists of tensors of one mesh that move along the same axes, whose ranks give the same ones. If they are
    offloaded, a list has at most WHOLE bytes of whole tensors, or one tensor."""
    by_axes: dict[tuple[DeviceMesh, frozenset[int]], Batch] = {}
    for number, tensor in enumerate(tensors):
        change = _change_of(tensor)
        if change is not None:
            by_axes.setdefault((tensor.device_mesh, change.axes), []).append((number, tensor, change))
    for members in by_axes.values():
        batch: Batch = []
        size = 0
        for member in members:
            _, tensor, _ = member
            whole = tensor.numel() * tensor.element_size()
            if batch and offloads and size + whole > WHOLE:
                yield batch
                batch, size = [], 0
            batch.append(member)
            size += whole
        yield batch


def _change_of(tensor: DTensor) -> Change | None:
    """Return the change to a whole tensor; None if torch gathers it: nothing to do, a gradient, or it can't join
    others."""
    whole = (Replicate(),) * tensor.device_mesh.ndim
    if tensor.placements == whole or _wants_gradient(tensor):
        return None
    change = read_change(tensor, whole)
    return change if change is not None and change.axes else None


def _wants_gradient(tensor: DTensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _joined(tensor: DTensor, cuts: Sequence[Cut]) -> torch.Tensor:
    """Gather a tensor of which ranks hold several boxes, as `strided_cuts` says. Collective over its mesh.

    Torch's own steps raise, or join the wrong rows, where another shard cuts what a strided shard left: of 12 rows on a
    mesh of (2, 2), `_StridedShard(0, split_factor=3)` and then `Shard(0)`.
    """
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    here, axes = mesh.get_coordinate() or [], sorted({cut.coordinate for cut in cuts})
    ranges = [range(size) if axis in axes else range(1) for axis, size in enumerate(mesh.shape)]
    held = [runs_at(cuts, shape, coordinate) for coordinate in itertools.product(*ranges)]
    local = settled(tensor._local_tensor).detach().to(mesh.device_type)
    require_lengths(tensor, runs_at(cuts, shape, here), "a tensor to gather")
    most = max([math.prod(lengths_of(runs)) for runs in held]) * local.itemsize
    buffer = torch.zeros(most, dtype=torch.uint8, device=local.device)
    buffer[: local.nbytes] = local.contiguous().flatten().view(torch.uint8)
    for axis in reversed(axes):
        group = mesh.get_group(axis)
        by_rank = {rank: torch.empty_like(buffer) for rank in dist.get_process_group_ranks(group)}
        dist.all_gather([*by_rank.values()], buffer, group)
        buffer = torch.cat([by_rank[rank] for rank in ranks_along(mesh, [axis], here).ranks])
    whole = local.new_empty(shape)
    for part, runs in zip(buffer.split(most) if most else (), held):
        lengths = lengths_of(runs)
        values = part[: math.prod(lengths) * local.itemsize].view(local.dtype).view(lengths)
        for box in itertools.product(*runs):
            at = tuple([slice(run.offset, run.offset + run.length) for run in box])
            whole[at] = values[tuple([slice(run.local_offset, run.local_offset + run.length) for run in box])]
    return whole


def _gathered(batch: Batch, receivers: frozenset[int], offloads: bool) -> dict[int, torch.Tensor]:
    """Gather the tensors of a batch. Collective over the ranks along the axes on which they move."""
    mesh = batch[0][1].device_mesh
    changes = {}
    for number, tensor, change in batch:
        moved = tensor if tensor._local_tensor.device.type == mesh.device_type else tensor.to(mesh.device_type)
        changes[number] = change._replace(tensor=moved)
    wholes: dict[int, torch.Tensor] = {}
    for numbers in batches(mesh, changes)[0]:
        gathered = change_together(mesh, [changes[number] for number in numbers], BUDGET, receivers)
        wholes |= zip(numbers, _offloaded(gathered) if offloads else gathered)
    return wholes


def _offloaded(wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the host; from a GPU through one pinned buffer, so that the host waits for the GPU once."""
    staged = [whole for whole in wholes if not _is_on_host(whole) and 0 < whole.nbytes <= WHOLE]
    if not staged or sum([whole.nbytes for whole in staged]) > WHOLE:
        return [whole.cpu() for whole in wholes]
    sizes = [aligned(whole.nbytes) for whole in staged]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=True)
    inside = {}
    for whole, part in zip(staged, buffer.split(sizes)):
        inside[id(whole)] = part[: whole.nbytes].view(whole.dtype).view(whole.shape).copy_(whole, non_blocking=True)
    torch.accelerator.current_stream(staged[0].device).synchronize()
    return [inside[id(whole)].clone() if id(whole) in inside else whole.cpu() for whole in wholes]


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"
