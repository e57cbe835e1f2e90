"""Full state dicts: where torch gathers one DTensor after the other, all of a mesh go in exchanges.

What `get_model_state_dict` does with `full_state_dict=True`, and FSDP's optimizer state. If some ranks only want the
result, as rank 0 does of a state that is offloaded, only these receive anything. What `set_model_state_dict` loads
goes torch's own way, apart from strided shards that are cut unevenly: those are cut as the tensors are that are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import _state_dict_utils
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Replicate

from ..distributed._torch import original
from ..patching.trampoline import swap_code
from ._planner.schedule import aligned
from .mesh_moves import Change, batches, change_together, read_change
from .sharding import Meshes, misfit
from .strided import scattered, uneven_strides

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed.tensor._planner.regions import Regions

BUDGET = 256 << 20  # bytes of buffers
WHOLE = 256 << 20  # bytes of whole tensors that aren't offloaded yet

one_by_one = original(_state_dict_utils, "_gather_state_dict")
scatter_rest = original(_state_dict_utils, "_distribute_state_dict")
cut_rest = original(_state_dict_utils, "_distribute_tensors")


def gather_together() -> Any:
    """Let torch's function gather in exchanges, for all modules that hold it by name. Returns its code."""
    return swap_code(_state_dict_utils._gather_state_dict, gather_state_dict)


def gather_one_by_one(code: Any) -> None:
    """Take it back."""
    _state_dict_utils._gather_state_dict.__code__ = code


def scatter_by_chunks() -> Any:
    """Let torch's function load what all ranks have whole into uneven strided shards. Returns its code."""
    return swap_code(_state_dict_utils._distribute_state_dict, scatter_state_dict)


def scatter_by_axes(code: Any) -> None:
    """Take it back."""
    _state_dict_utils._distribute_state_dict.__code__ = code


def cut_by_chunks() -> Any:
    """Let torch's function load what rank 0 has whole into uneven strided shards. Returns its code."""
    return swap_code(_state_dict_utils._distribute_tensors, cut_tensors)


def cut_by_axes(code: Any) -> None:
    """Take it back."""
    _state_dict_utils._distribute_tensors.__code__ = code


def scatter_state_dict(
    full_state_dict: dict[str, Any], local_state_dict: dict[str, Any], device: torch.device, pg: Any = None
) -> None:
    """As torch's function."""
    rest, meshes = {}, Meshes()
    for key, value in full_state_dict.items():
        tensor: Any = local_state_dict.get(key)
        held = _uneven(tensor, value, meshes)
        if held is None:
            rest[key] = value
        else:
            local_state_dict[key] = scattered(value.detach(), tensor.device_mesh, tensor.placements, held, 0)
    scatter_rest(rest, local_state_dict, device, pg)


def cut_tensors(local_state_dict: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None) -> None:
    """As torch's function: beside each tensor stands the whole one, of which it takes its part."""
    meshes = Meshes()
    for key in keys:
        pair: Any = local_state_dict.get(key)
        held = _uneven(pair[0], pair[1], meshes) if isinstance(pair, tuple) else None
        if held is None:
            continue
        tensor, part = pair
        for dim, (start, length) in enumerate(zip(*held.box(tensor.device_mesh.get_coordinate()))):
            part = part.narrow(dim, start, length)
        if tensor.is_meta:
            meta = TensorMeta(tensor.shape, tensor.stride(), part.dtype)
            spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
            tensor = DTensor(part.detach().clone(), spec, requires_grad=False)
        else:
            tensor.to_local().copy_(part)
        local_state_dict[key] = tensor
    cut_rest(local_state_dict, keys, device, pg)


def _uneven(tensor: Any, whole: Any, meshes: Meshes) -> Regions | None:
    """What ranks hold of a tensor whose shards torch would cut otherwise, or not at all; None of others.

    Raises:
        ValueError: this rank holds another part than FSDP2 does.
    """
    if not isinstance(tensor, DTensor) or not isinstance(whole, torch.Tensor) or whole.shape != tensor.shape:
        return None
    held = uneven_strides(whole, tensor.device_mesh, tensor.placements)
    wrong = held and misfit("a tensor to load", tensor, held, meshes)
    if wrong:
        raise ValueError(f"A full state dict can't be loaded: {wrong}.")
    return held


def gather_state_dict(state_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
    """As torch's function: the same results, on the same ranks."""
    offloads = bool(options.get("cpu_offload"))
    # With another group than the default one, the ranks of a mesh may each give another one, and would not agree.
    agreed = options.get("pg") in (None, dist.group.WORLD)
    receivers = frozenset(options.get("ranks_only") or () if agreed else ())
    wholes: dict[int, torch.Tensor] = {}
    for batch in _batches(list(_dtensors(state_dict)), offloads):
        wholes |= _gathered(batch, receivers, offloads)
    if not wholes:
        return one_by_one(state_dict, **options)  # type: ignore[no-any-return]
    return one_by_one(_with(state_dict, iter(range(1 << 62)), wholes), **options)  # type: ignore[no-any-return]


def _dtensors(tree: Any) -> Iterator[DTensor]:
    """In the order in which torch comes to them."""
    if isinstance(tree, DTensor):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _dtensors(part)


def _with(tree: Any, numbers: Iterator[int], wholes: dict[int, torch.Tensor]) -> Any:
    """The tree with whole tensors in place of the DTensors with these numbers."""
    if isinstance(tree, DTensor):
        return wholes.get(next(numbers), tree)
    if isinstance(tree, dict):
        return {key: _with(part, numbers, wholes) for key, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        parts = [_with(part, numbers, wholes) for part in tree]
        return tuple(parts) if isinstance(tree, tuple) else parts
    return tree


Batch = list[tuple[int, DTensor, Change]]


def _batches(tensors: Sequence[DTensor], offloads: bool) -> Iterator[Batch]:
    """Tensors of one mesh that go together, as all ranks find them that talk for one of them: those that move along
    the same axes, or, if they don't stay on the device, as many of these as fit the budget when they are whole.

    Ranks that differ along other axes may hold other tensors, as they may where each is gathered by itself.
    """
    alike: dict[tuple[DeviceMesh, frozenset[int]], Batch] = {}
    for number, tensor in enumerate(tensors):
        change = _change_of(tensor)
        if change is not None:
            alike.setdefault((tensor.device_mesh, change.axes), []).append((number, tensor, change))
    for some in alike.values():
        batch: Batch = []
        size = 0
        for each in some:
            whole = each[1].numel() * each[1].element_size()
            if batch and offloads and size + whole > WHOLE:
                yield batch
                batch, size = [], 0
            batch.append(each)
            size += whole
        yield batch


def _change_of(tensor: DTensor) -> Change | None:
    """None if torch's own way is left to do it: there is nothing to gather, or somebody wants a gradient."""
    whole = (Replicate(),) * tensor.device_mesh.ndim
    if tensor.placements == whole or (tensor.requires_grad and torch.is_grad_enabled()):
        return None
    change = read_change(tensor, whole)
    return change if change is not None and change.axes else None


def _gathered(batch: Batch, receivers: frozenset[int], offloads: bool) -> dict[int, torch.Tensor]:
    """The whole tensors, by number; empty ones on a rank that doesn't want them. Without a group there are none."""
    mesh = batch[0][1].device_mesh
    changes = {}
    for number, tensor, change in batch:
        moved = tensor if tensor._local_tensor.device.type == mesh.device_type else tensor.to(mesh.device_type)
        changes[number] = change._replace(tensor=moved)
    found: dict[int, torch.Tensor] = {}
    for numbers in batches(mesh, changes)[0]:
        made = change_together(mesh, [changes[number] for number in numbers], BUDGET, receivers)
        found |= zip(numbers, _offloaded(made) if offloads else made)
    return found


def _offloaded(wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in the host's memory. From another device they come through one buffer that can't be paged out, and the
    host waits for that device once; what is returned can be, since a whole model may be more than a host can pin."""
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
