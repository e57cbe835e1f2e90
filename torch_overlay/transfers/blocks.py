"""Blocks of tensors in a flat buffer of bytes, copied there and back by few calls. Start at `Copies`.

A block travels as integers of its elements' width, so that every dtype can travel, and keeps every bit. A tensor that
changes its dtype is converted by the copy into the buffer, or out of it. Between two runs of a transfer only places
in memory are kept, and no tensors: views would keep memory alive that a tensor gave up. With `keep` the views are
kept, too (see `Views`); making them is most of what a run of many small tensors costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ..distributed.tensor._runner.exchange import part

if TYPE_CHECKING:
    from ._planner.schedule import Load


Locals = Sequence["torch.Tensor | None"]  # local tensors by index of the move; None where this rank has no part
Wires = Sequence["torch.dtype | None"]  # by index of the move, the dtype that travels; None if no dtype changes
Copied = tuple[list["torch.Tensor"], list["torch.Tensor"]]  # views of tensors, and of their places in a buffer

# For each width of elements in bytes, the dtype that stands for it. Its copies keep every bit.
BY_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Block(NamedTuple):
    """Where a block of a local tensor lies.

    Attributes:
        tensor: the index of the move whose local tensor it is.
        size, stride, offset: as `as_strided` takes them, in elements.
    """

    tensor: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def at(tensor: int, view: torch.Tensor, is_dense: bool = False) -> Block:
        """Return the block that a view shows."""
        if is_dense:
            return Block(tensor, (view.numel(),), (1,), view.storage_offset())
        return Block(tensor, tuple(view.shape), view.stride(), view.storage_offset())

    @property
    def is_dense(self) -> bool:
        """True if the block is a row of elements without gaps."""
        return self.stride == (1,)

    def of(self, locals_: Locals) -> torch.Tensor:
        """Return the view of this block."""
        return present(locals_[self.tensor]).as_strided(*self[1:])


class Views:
    """A cache of the strided views that one run of a transfer made of its tensors and buffers, for the next run.

    It is empty unless runs ask for it (``keeps``). A view is used again if its tensor has the same storage, address,
    type, shape and strides as in the run before; any other view is replaced during the next run.

    The address alone isn't enough. A program may free a tensor's memory by resizing its storage to 0, as FSDP does, and
    the allocator may then give the same address to another tensor. The cached view still belongs to the first storage,
    which has no memory any more.
    """

    def __init__(self) -> None:
        self.keeps = False  # whether the views of this run are cached
        self._state: object = None
        self._lay: list[list[object]] = [[], []]  # by side and index of the move, where the local tensor lay
        self._whole: list[list[torch.Tensor | None]] = [[], []]  # the local tensors, as `integer_views` returns them
        self.changed: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
        self._of: dict[int, tuple[Copied, torch.Tensor, list[Copied]]] = {}

    def begin(
        self, sources: Locals, targets: Locals, wires: Wires, keeps: bool, state: object = None
    ) -> tuple[Locals, Locals]:
        """Begin a run: return the sources and the targets as `integer_views` does, and set `changed` to those that lie
        elsewhere than in the last run, by index for each side."""
        self.keeps = keeps
        if not keeps:
            self.forget()
            return integer_views(sources, wires), integer_views(targets, wires)
        if state is not None and state is self._state:
            self.changed = frozenset(), frozenset()
            return self._whole[0], self._whole[1]
        sides, changed = [], []
        for side, locals_ in enumerate((sources, targets)):
            lay = [None if local is None else _location(local) for local in locals_]
            before = self._lay[side] or [_UNKNOWN] * len(lay)
            other = [n for n, (old, new) in enumerate(zip(before, lay, strict=True)) if old != new or new is _UNKNOWN]
            whole = self._whole[side] or [None] * len(lay)
            for number, local in zip(other, integer_views([locals_[n] for n in other], [wires[n] for n in other])):
                whole[number] = local
            self._lay[side], self._whole[side] = lay, whole
            sides.append(whole)
            changed.append(frozenset(other))
        self.changed, self._state = (changed[0], changed[1]), state
        return sides[0], sides[1]

    def drop_blocks(self) -> None:
        """Let go of the views of blocks. Called before the blocks are computed anew."""
        self._of = {}

    def forget(self) -> None:
        """Let go of all views, and of the memory that they hold."""
        self._of, self._state = {}, None
        self._lay, self._whole, self.changed = [[], []], [[], []], (frozenset(), frozenset())

    def of(self, copies: Copies, side: int, locals_: Locals, buffer: torch.Tensor) -> list[Copied]:
        """Return what `copies.views(locals_, buffer)` returns, from the cache where nothing has changed."""
        if not self.keeps:
            return copies.views(locals_, buffer)
        kept, changed = self._of.get(id(copies)), self.changed[side]
        # The buffer itself is compared: one that is free again has no memory, whatever its address was.
        if kept is not None and kept[1] is buffer and not changed:
            return kept[2]
        if kept is None:
            own = [block.of(locals_) for block in copies.blocks]
        else:
            own = [
                block.of(locals_) if block.tensor in changed else view for block, view in zip(copies.blocks, kept[0][0])
            ]
        inside = kept[0][1] if kept is not None and kept[1] is buffer else copies.inside(buffer, own)
        groups = in_groups(copies.blocks, own, inside)
        self._of[id(copies)] = (own, inside), buffer, groups
        return groups


_UNKNOWN = object()  # where a tensor lies that is copied anew in each run


def _location(local: torch.Tensor) -> object:
    """Return where and how a local tensor lies, to compare with that of the next run; `_UNKNOWN` for a tensor that
    `integer_view` waits for or copies, and that has to be read again in each run."""
    if isinstance(local, AsyncCollectiveTensor) or local.is_conj() or local.is_neg():
        return _UNKNOWN
    return local.data_ptr(), local.untyped_storage()._cdata, local.dtype, local.shape, local.stride()


@dataclass(slots=True)
class ContiguousBlocks:
    """Blocks of one width that follow one another in a buffer without gaps.

    Attributes:
        at: the byte of the buffer at which they begin.
        size: their bytes.
        width: the integer dtype of their width; for tensors that change their dtype, the dtype that travels.
        blocks: of the local tensors, in the order of the buffer.
    """

    at: int
    size: int
    width: torch.dtype
    blocks: list[Block]

    def inside(self, buffer: torch.Tensor, views: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the places of the blocks in a buffer, each in the shape of its view in `views`. One call makes all of
        them, which costs less than `narrow` and `view` for each."""
        flat = buffer.narrow(0, self.at, self.size).view(self.width)
        return torch._C._nn.unflatten_dense_tensors(flat, views)  # type: ignore[no-any-return]


@dataclass(slots=True)
class StridedBlocks:
    """Blocks of one width of which each lies in several messages of a buffer, in equal parts.

    Attributes:
        width: the dtype as which the buffer is read, as of `ContiguousBlocks`.
        blocks: of the local tensors; the first dim of each goes over the parts.
        places: where the blocks lie in the buffer, read as a tensor of this width. Each place is a strided view of the
            buffer: its first dim goes over blocks, its second over the parts of a block.
    """

    width: torch.dtype
    blocks: list[Block]
    places: list[Block]

    def inside(self, buffer: torch.Tensor, views: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the places of the blocks in a buffer, as strided views over all parts. `views` isn't used."""
        flat = [buffer.view(self.width)]
        return [view for place in self.places for view in place.of(flat).unbind()]

    @staticmethod
    def blocks_of(load: Load, locals_: Locals) -> list[Block]:
        """Return where each tensor's block of a load lies in its local tensor. The first dim of each block goes over
        the parts of the load."""
        blocks = []
        for tensor in load.tensors:
            view = part(present(locals_[tensor]), load.box)
            size, stride = _size_in_parts(load), view.stride()
            apart = size[1 + load.dim] * stride[load.dim]
            blocks.append(Block(tensor, size, (apart, *stride), view.storage_offset()))
        return blocks

    @staticmethod
    def place(load: Load, numbers: range, width: torch.dtype) -> Block:
        """Return one strided block of the buffer: the places of the blocks of some neighbouring tensors of a load."""
        size = _size_in_parts(load)
        inner = [math.prod(size[dim + 1 :]) for dim in range(1, len(size))]
        step, apart, at = (n // width.itemsize for n in (load.step, load.apart, load.at + numbers.start * load.step))
        return Block(0, (len(numbers), *size), (step, apart, *inner), at)


def _size_in_parts(load: Load) -> tuple[int, ...]:
    """Return the size of a load's block with one dim more in front, which goes over its parts."""
    size = list(load.box.length)
    size[load.dim] //= load.parts
    return load.parts, *size


class Copies:
    """The blocks of one direction of an exchange, or of one point-to-point message, copied by as few calls as possible.

    Args:
        layouts: where the blocks lie in the buffer, as `locate_blocks` returns them.

    Attributes:
        blocks: all of them, in the order of the layouts.
    """

    def __init__(self, layouts: Sequence[ContiguousBlocks | StridedBlocks]) -> None:
        self._layouts = layouts
        self.blocks = [block for layout in layouts for block in layout.blocks]

    def pack(self, locals_: Locals, buffer: torch.Tensor, views: Views | None = None) -> None:
        """Copy the blocks of the local tensors into the buffer. `views` is the cache, if there is one."""
        for own, inside in self.views(locals_, buffer) if views is None else views.of(self, 0, locals_, buffer):
            torch._foreach_copy_(inside, own)

    def land(self, locals_: Locals, buffer: torch.Tensor, views: Views | None = None) -> None:
        """Copy the blocks from the buffer into the local tensors. `views` is the cache, if there is one."""
        for own, inside in self.views(locals_, buffer) if views is None else views.of(self, 1, locals_, buffer):
            torch._foreach_copy_(own, inside)

    def views(self, locals_: Locals, buffer: torch.Tensor) -> list[Copied]:
        """Return the views of the blocks, and the views of their places in the buffer: a pair of lists for each call of
        `torch._foreach_copy_`."""
        own = [block.of(locals_) for block in self.blocks]
        return in_groups(self.blocks, own, self.inside(buffer, own))

    def inside(self, buffer: torch.Tensor, own: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return views of the places of the blocks in the buffer."""
        places: list[torch.Tensor] = []
        for layout in self._layouts:
            places += layout.inside(buffer, own[len(places) : len(places) + len(layout.blocks)])
        return places


def in_groups(blocks: Sequence[Block], own: list[torch.Tensor], other: list[torch.Tensor]) -> list[Copied]:
    """Group views of blocks, and the views to or from which they are copied, in lists for `torch._foreach_copy_`.

    A GPU copies a list by one kernel if all its tensors are dense, and each side is of one dtype; it copies tensor by
    tensor if a single one is not. So there, dense blocks are grouped by their dtypes, and all others are one list. The
    CPU always copies tensor by tensor, and all blocks are one list.
    """
    if not own or own[0].is_cpu:
        return [(own, other)] if own else []
    by_dtypes: dict[object, Copied] = {}
    for block, view, other_view in zip(blocks, own, other):
        group = by_dtypes.setdefault((view.dtype, other_view.dtype) if block.is_dense else None, ([], []))
        group[0].append(view)
        group[1].append(other_view)
    return [*by_dtypes.values()]


def present(local: torch.Tensor | None) -> torch.Tensor:
    """Return a local tensor that a schedule moves on this rank."""
    if local is None:
        raise AssertionError("a rank has what its schedule moves")
    return local


def free(buffer: torch.Tensor) -> None:
    """Free the memory of a buffer at once. A thread of the backend may hold the tensor a little longer."""
    buffer.untyped_storage().resize_(0)


def integer_view(local: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory as integers, or of 16 bytes as complex128. Waits for a functional collective.

    A conjugate or negative view has no memory that holds its values, and is copied.
    """
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    width = BY_WIDTH[local.element_size()]
    # Unlike detach(), .data has a version counter of its own. The run raises the program's counter when it ends.
    plain = local.data
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain if plain.dtype == width else plain.view(width)


def integer_views(locals_: Locals, wires: Wires) -> list[torch.Tensor | None]:
    """Return each local tensor as `integer_view` does; without a cast to integers if it changes its dtype on the way
    (`wires`). None stays None."""
    return [None if t is None else integer_view(t) if wire is None else t.data for t, wire in zip(locals_, wires)]


def locate_blocks(loads: Sequence[Load], locals_: Locals, wires: Wires) -> list[ContiguousBlocks | StridedBlocks]:
    """Compute where the blocks of loads lie in the local tensors and in the buffer."""
    contiguous: list[ContiguousBlocks] = []
    strided: dict[torch.dtype, StridedBlocks] = {}
    for load in loads:
        widths = [wires[tensor] or present(locals_[tensor]).dtype for tensor in load.tensors]
        if load.parts > 1:
            blocks, at = StridedBlocks.blocks_of(load, locals_), 0
            for width, same in itertools.groupby(widths):
                numbers = range(at, at + len([*same]))
                of_width = strided.setdefault(width, StridedBlocks(width, [], []))
                of_width.blocks += blocks[numbers.start : numbers.stop]
                of_width.places.append(StridedBlocks.place(load, numbers, width))
                at = numbers.stop
            continue
        for number, (tensor, width) in enumerate(zip(load.tensors, widths)):
            view, at = part(present(locals_[tensor]), load.box), load.at + number * load.step
            block = Block.at(tensor, view, view.is_contiguous())
            size = load.box.elements * width.itemsize
            last = contiguous[-1] if contiguous else None
            if last is not None and last.width == width and last.at + last.size == at:
                last.blocks.append(block)
                last.size += size
            else:
                contiguous.append(ContiguousBlocks(at, size, width, [block]))
    return [*contiguous, *strided.values()]


class Buffers:
    """Allocates the flat buffers of bytes for exchanges.

    A buffer that is given back is freed at once; or, after `keep`, held for the next request of the same length, as
    long as the buffers that are held or in use take no more than a limit.

    Attributes:
        kept: the buffers that are held and not in use.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kept: list[torch.Tensor] = []
        self._limit = self._used = 0

    def keep(self, limit: int) -> None:
        """Hold buffers from now on, up to `limit` bytes. On a GPU none is held: torch's allocator holds them, and knows
        which stream still reads them."""
        self._limit = limit if self.device.type == "cpu" else 0
        self._make_room(0)

    def take(self, size: int) -> torch.Tensor:
        """Return a buffer of `size` bytes. Its content is undefined."""
        fit = next((buffer for buffer in self.kept if len(buffer) == size), None)
        if fit is None:
            self._make_room(size)
            fit = torch.empty(size, dtype=torch.uint8, device=self.device)
        else:
            self.kept = [buffer for buffer in self.kept if buffer is not fit]
        self._used += size
        return fit

    def _make_room(self, size: int) -> None:
        """Free held buffers until another `size` bytes are within the limit."""
        while self.kept and self._used + self._idle + size > self._limit:
            free(self.kept.pop(0))  # kept views of it would hold its memory

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back. Neither it nor a view of it may be used after that."""
        self._used -= len(buffer)
        if self._used + self._idle + len(buffer) > self._limit:
            free(buffer)
        else:
            self.kept.append(buffer)

    def forget(self) -> None:
        """Free the held buffers, and forget those in use: after an error a backend may still write into them."""
        for buffer in self.kept:
            free(buffer)
        self.kept, self._used = [], 0

    @property
    def _idle(self) -> int:
        """The bytes of the held buffers."""
        return sum(map(len, self.kept))
