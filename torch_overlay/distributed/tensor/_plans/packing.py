"""What a rank packs for others into one flat tensor, and unpacks from what they sent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed._functional_collectives import _are_we_tracing

if TYPE_CHECKING:
    from .._planner.grids import Grid
    from .._planner.regions import Box

Local = Callable[[torch.Tensor], torch.Tensor]
Stages = tuple[Callable[[Any], Any], ...]  # the first takes a local tensor, each other what the one before it returned
Coordinate = Sequence[int]
Blocks = Sequence[tuple[int | None, "Box"]]  # where each box begins in a flat tensor; None if it lies elsewhere

# What NCCL and Gloo move; other types travel as their bytes.
MOVED = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
}

# Bytes of a message from which on a second copy of it costs more than some more calls, by type of device; of others, as
# on the CPU. Measured there; for GPUs taken over, until it is measured on one.
LARGE: Mapping[str, int] = MappingProxyType({"cpu": 1 << 20, "cuda": 1 << 20})


def is_large(tensor: torch.Tensor, elements: int) -> bool:
    """Whether so many elements of its type are worth more calls than one copy takes, where tensors may be changed; not
    those of a subclass, a Parameter for example."""
    if type(tensor) is not torch.Tensor:
        return False
    kind = "cpu" if tensor.is_cpu else tensor.device.type
    least = LARGE[kind] if kind in LARGE else LARGE["cpu"]
    return elements * tensor.element_size() >= least and may_change(tensor)


def may_change(tensor: torch.Tensor) -> bool:
    """Whether a tensor that nobody else has may be changed in place: not while tracing, nor under autograd."""
    return not _are_we_tracing() and not (tensor.requires_grad and torch.is_grad_enabled())


class Here(NamedTuple):
    """Where a step runs: this rank's coordinate, and what it holds before the step and after it."""

    coordinate: Coordinate
    held: Box
    wanted: Box


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def nothing_of(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor without elements that comes from this one. AOTAutograd drops a collective that nothing depends on (as
    dead code), and its partitioner runs one that depends on nothing in both graphs, forward and backward; other ranks
    run it once."""
    return tensor.reshape(-1).narrow(0, 0, 0).view(shape)


def flattened(local: torch.Tensor) -> torch.Tensor:
    """All elements, one after the other in memory; of a single column, `reshape` would make a view that skips some."""
    return local.reshape(-1).contiguous()


def packing(grid: Grid) -> Local:
    """From the local tensor to what goes to the members, flat."""
    lengths, expanded, order = grid
    if grid.plain:
        return flattened
    if expanded != lengths:
        return lambda local: flattened(local.reshape(lengths).expand(expanded).permute(order))
    return lambda local: flattened(local.reshape(lengths).permute(order))


def unpacking(grid: Grid, shape: Sequence[int]) -> Local:
    """From what came from the members, flat, to the local tensor."""
    lengths, _, order = grid
    if grid.plain:
        return lambda flat: flat.view(shape)
    return lambda flat: flat.view(lengths).permute(order).reshape(shape).contiguous()


def unpacking_in_place(grid: Grid, shape: Sequence[int]) -> Local:
    """`unpacking` where what the first axes bring is in its place already: if the blocks within are large, each is
    sorted by itself in what came, which is overwritten, so that a large tensor isn't there twice."""
    lengths, _, order = grid
    fixed = next((i for i, dim in enumerate(order) if i != dim), len(order))
    parts = math.prod(lengths[:fixed])
    once = unpacking(grid, shape)
    if grid.plain or parts == 1:
        return once
    inner = [dim - fixed for dim in order[fixed:]]

    def run(flat: torch.Tensor) -> torch.Tensor:
        if not is_large(flat, flat.numel() // parts):
            return once(flat)
        for block in flat.view(parts, *lengths[fixed:]):
            # The clone is never a view of the block, as one from `reshape` may be, and is gone before the next.
            block.copy_(block.permute(inner).clone(memory_format=torch.contiguous_format).view(block.shape))
        return flat.view(shape)

    return run


def assembled(
    flat: torch.Tensor, pieces: Blocks, shape: Sequence[int], kept: torch.Tensor | None = None
) -> torch.Tensor:
    """A tensor of this shape from blocks that lie at these offsets of a flat one; the one without is `kept`. It is a
    view of the flat one where the blocks lie in place there and at most as much lies behind them."""
    if not pieces:
        return nothing_of(flat, shape)
    dim = _row(pieces, shape)
    if dim is not None and flat.numel() <= 2 * math.prod(shape) and _in_place(pieces, dim, shape):
        return flat.narrow(0, 0, math.prod(shape)).view(shape)  # keeps the padding in memory, too
    views = [view_of(flat, at, box, kept) for at, box in pieces]
    if dim is None:
        whole = flat.new_empty(shape)
        for view, (_, box) in zip(views, pieces, strict=True):
            part(whole, box).copy_(view)
        return whole
    return torch.cat(views, dim).contiguous() if len(views) > 1 else views[0].clone()


def view_of(flat: torch.Tensor, at: int | None, box: Box, kept: torch.Tensor | None) -> torch.Tensor:
    """The block for a box, from this offset on; with no offset, the one that was kept."""
    if at is None:
        assert kept is not None, "a block without an offset stayed here"  # noqa: S101
        return kept
    return flat.narrow(0, at, box.elements).view(box.length)


def _in_place(pieces: Blocks, dim: int, shape: Sequence[int]) -> bool:
    """Whether boxes that follow one another along a dim lie as in the tensor that they make, from the start on."""
    if math.prod(shape[:dim]) != 1:
        return False
    return [at for at, _ in pieces] == [0, *itertools.accumulate(box.elements for _, box in pieces)][:-1]


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Blocks, each row-major and one after the other, in a flat tensor; of a single contiguous one, a view."""
    if parts[0].ndim and all(part.shape[1:] == parts[0].shape[1:] for part in parts):
        return flattened(torch.cat(parts) if len(parts) > 1 else parts[0])
    lengths = [part.numel() for part in parts]
    if not is_large(parts[0], sum(lengths)) or all(part.is_contiguous() for part in parts):
        return torch.cat([part.reshape(-1) for part in parts])
    flat = parts[0].new_empty(sum(lengths))  # to flatten them first would copy them twice
    torch._foreach_copy_([piece.view(part.shape) for piece, part in zip(flat.split(lengths), parts)], parts)
    return flat


def _row(pieces: Blocks, shape: Sequence[int]) -> int | None:
    """The dim along which the boxes follow one another and fill the shape, if there is one."""
    for dim in range(len(shape)):
        at = 0
        for _, box in pieces:
            across = all(n == m for d, (n, m) in enumerate(zip(box.length, shape, strict=True)) if d != dim)
            if not across or box.start[dim] != at:
                break
            at += box.length[dim]
        else:
            if at == shape[dim]:
                return dim
    return None


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    plain = flat.resolve_conj().resolve_neg().contiguous()
    if plain.ndim and plain.stride(-1) != 1:  # of a dim of length 1, which is contiguous with any stride
        plain = plain.clone(memory_format=torch.contiguous_format)
    return plain.view(torch.uint8)
