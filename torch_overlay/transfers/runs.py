"""Runs: blocks of tensors that lie side by side in a flat buffer of bytes, copied there and back by one call.

A block travels as whole numbers of its elements' width, so that every type travels; one that changes its type on the
way is converted by the copy into the buffer, or out of it. What is kept between two runs of a
transfer are places in memory and no tensors: views would keep memory alive that a tensor doesn't have any more, and one
made in inference mode can't be written outside of it.
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

Locals = Sequence["torch.Tensor | None"]  # by the number of the tensor; None where this rank has no part
Wires = Sequence["torch.dtype | None"]  # the types in which tensors travel that change theirs; None: it stays

# A type that is copied as it is, for each width of elements.
_BY_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Block(NamedTuple):
    """Where a block of a local tensor lies: the number of the tensor, and what `as_strided` takes."""

    tensor: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def at(tensor: int, view: torch.Tensor, is_dense: bool = False) -> Block:
        """The block that a view shows; as a row of elements if these lie one after the other, and it's said."""
        if is_dense:
            return Block(tensor, (view.numel(),), (1,), view.storage_offset())
        return Block(tensor, tuple(view.shape), view.stride(), view.storage_offset())

    @property
    def is_dense(self) -> bool:
        """Whether it is such a row."""
        return self.stride == (1,)

    def of(self, locals_: Locals) -> torch.Tensor:
        """The view, of the tensors of whole numbers that are there now."""
        return there(locals_[self.tensor]).as_strided(*self[1:])


class _Copies:
    """Blocks that one call copies, and where they lie in a buffer of bytes."""

    __slots__ = ()
    blocks: list[Block]

    def pack(self, locals_: Locals, buffer: torch.Tensor) -> None:
        """Copy the blocks into the buffer."""
        views = [block.of(locals_) for block in self.blocks]
        copy_all(self._inside(buffer, views), views, self.blocks)

    def land(self, locals_: Locals, buffer: torch.Tensor) -> None:
        """Copy the blocks out of the buffer."""
        views = [block.of(locals_) for block in self.blocks]
        copy_all(views, self._inside(buffer, views), self.blocks)

    def _inside(self, buffer: torch.Tensor, views: list[torch.Tensor]) -> list[torch.Tensor]:
        raise NotImplementedError


@dataclass(slots=True)
class Run(_Copies):
    """Blocks of one width that follow one another in a buffer.

    Attributes:
        at, size: where they lie, in bytes.
        width: of an element, as a type; of one that changes its type, the type in which it travels.
    """

    at: int
    size: int
    width: torch.dtype
    blocks: list[Block]

    def _inside(self, buffer: torch.Tensor, views: list[torch.Tensor]) -> list[torch.Tensor]:
        flat = buffer.narrow(0, self.at, self.size).view(self.width)
        return torch._C._nn.unflatten_dense_tensors(flat, views)  # type: ignore[no-any-return]


@dataclass(slots=True)
class Spread(_Copies):
    """Blocks of one width whose parts lie in several messages.

    Attributes:
        places: where the parts of some blocks lie in the buffer, as one that has elements of this width: one block, and
            the parts of another, along each row of its first dim.
    """

    width: torch.dtype
    blocks: list[Block]
    places: list[Block]

    def _inside(self, buffer: torch.Tensor, views: list[torch.Tensor]) -> list[torch.Tensor]:
        flat = [buffer.view(self.width)]
        return [view for place in self.places for view in place.of(flat).unbind()]

    @staticmethod
    def blocks_of(load: Load, locals_: Locals) -> list[Block]:
        """Where the load's blocks lie, part by part."""
        found = []
        for tensor in load.tensors:
            view = part(there(locals_[tensor]), load.box)
            size, stride = _in_parts(load), view.stride()
            apart = size[1 + load.dim] * stride[load.dim]
            found.append(Block(tensor, size, (apart, *stride), view.storage_offset()))
        return found

    @staticmethod
    def place(load: Load, numbers: range, width: torch.dtype) -> Block:
        """Where those of some of its tensors lie in the buffer."""
        size = _in_parts(load)
        inner = [math.prod(size[dim + 1 :]) for dim in range(1, len(size))]
        step, apart, at = (n // width.itemsize for n in (load.step, load.apart, load.at + numbers.start * load.step))
        return Block(0, (len(numbers), *size), (step, apart, *inner), at)


def _in_parts(load: Load) -> tuple[int, ...]:
    size = list(load.box.length)
    size[load.dim] //= load.parts
    return load.parts, *size


def copy_all(to: Sequence[torch.Tensor], given: Sequence[torch.Tensor], blocks: Sequence[Block]) -> None:
    """Copy each tensor; on a GPU dense ones by a call of their own: it copies a list by one kernel if all of it is
    dense, with equal strides, and tensor by tensor else, as the CPU does always."""
    dense = [] if to[0].is_cpu else [number for number, block in enumerate(blocks) if block.is_dense]
    if not dense or len(dense) == len(blocks):
        torch._foreach_copy_(to, given)
        return
    for some in (dense, [number for number, block in enumerate(blocks) if not block.is_dense]):
        torch._foreach_copy_([to[number] for number in some], [given[number] for number in some])


def there(local: torch.Tensor | None) -> torch.Tensor:
    """What a schedule moves on this rank."""
    if local is None:
        raise AssertionError("a rank has what its schedule moves")
    return local


def free(buffer: torch.Tensor) -> None:
    """Give the memory back now: a thread of the backend may hold the tensor a little longer."""
    buffer.untyped_storage().resize_(0)


def as_whole_numbers(local: torch.Tensor) -> torch.Tensor:
    """A view of the same memory with a type that is copied bit by bit; what is still coming is waited for."""
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    width = _BY_WIDTH[local.element_size()]
    plain = local.data  # unlike detach(), with a version counter of its own: the run counts its writes when it ends
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain if plain.dtype == width else plain.view(width)


def numbers(locals_: Locals, wires: Wires) -> list[torch.Tensor | None]:
    """Each as whole numbers, unless it changes its type on the way."""
    return [None if t is None else as_whole_numbers(t) if wire is None else t.data for t, wire in zip(locals_, wires)]


def runs_of(loads: Sequence[Load], locals_: Locals, wires: Wires) -> list[Run | Spread]:
    """Blocks in the order in which they lie in a buffer, joined as far as their widths are equal; and those whose parts
    lie apart."""
    found: list[Run] = []
    spread: dict[torch.dtype, Spread] = {}
    for load in loads:
        widths = [wires[tensor] or there(locals_[tensor]).dtype for tensor in load.tensors]
        if load.parts > 1:
            blocks, at = Spread.blocks_of(load, locals_), 0
            for width, some in itertools.groupby(widths):
                numbers = range(at, at + len([*some]))
                one = spread.setdefault(width, Spread(width, [], []))
                one.blocks += blocks[numbers.start : numbers.stop]
                one.places.append(Spread.place(load, numbers, width))
                at = numbers.stop
            continue
        for number, (tensor, width) in enumerate(zip(load.tensors, widths)):
            view, at = part(there(locals_[tensor]), load.box), load.at + number * load.step
            block = Block.at(tensor, view, view.is_contiguous())
            size = load.box.elements * width.itemsize
            last = found[-1] if found else None
            if last is not None and last.width == width and last.at + last.size == at:
                last.blocks.append(block)
                last.size += size
            else:
                found.append(Run(at, size, width, [block]))
    return [*found, *spread.values()]
