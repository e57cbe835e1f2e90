"""Exchanges: carry out a schedule on tensors. Blocks are copied into one flat buffer of bytes, go out in one
all-to-all, and are copied to where they belong. While one all-to-all runs, the next buffer is packed and the last one
is emptied.

A block travels as whole numbers of its elements' width, so that every type travels, and blocks that lie side by side in
the buffer are copied by one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ..distributed.tensor._pack import part

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ._planner.schedule import Load, Messages, Schedule

Locals = Sequence["torch.Tensor | None"]  # by the number of the tensor; None where this rank has no part

# A type that is copied as it is, for each width of elements.
_BY_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Run(NamedTuple):
    """Blocks of one width that follow one another in a buffer.

    Attributes:
        at, size: where they lie, in bytes.
        width: of an element, as a type.
        blocks: views of the local tensors.
    """

    at: int
    size: int
    width: torch.dtype
    blocks: list[torch.Tensor]

    def inside(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The same blocks in the buffer."""
        flat = buffer.narrow(0, self.at, self.size).view(self.width)
        return torch._C._nn.unflatten_dense_tensors(flat, self.blocks)


class Way(NamedTuple):
    """One direction of an exchange, ready to run: bytes for each rank of the group, and the blocks."""

    splits: list[int]
    runs: list[Run]


class InFlight(NamedTuple):
    """An exchange that has begun; it holds the buffers until it is done."""

    work: dist.Work
    sent: torch.Tensor
    came: torch.Tensor


class Torn(RuntimeError):
    """An exchange failed, and some of the targets were written before."""


class Exchanges:
    """All exchanges of a transfer on one rank.

    Attributes:
        count: how many there are, the same on every rank.
    """

    def __init__(self, schedule: Schedule, count: int, group: ProcessGroup, device: torch.device) -> None:
        self.count, self.group, self.device = count, group, device
        self._place = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(group))}
        self.schedule = schedule = schedule.in_order(self._place)
        self._messages = [(schedule.packed(number, count), schedule.landed(number, count)) for number in range(count)]
        self._landed = 0
        self._bound: tuple[Locals, Locals] = (), ()
        self._ways: list[tuple[Way, Way]] = []
        self._kept: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

    @property
    def staging(self) -> int:
        """The most bytes that buffers take at one time."""
        most = 0
        for number, (out, into) in enumerate(self._messages):
            packed, landed = self._messages[number + 1] if number + 1 < self.count else (None, None)
            following = (packed.size if packed else 0, landed.size if landed else 0)
            most = max(most, out.size + into.size + following[0], into.size + sum(following))
        return most

    def run(self, sources: Locals, targets: Locals) -> None:
        """Write what the targets lack, and copy what they have in their sources.

        Raises:
            Torn: an exchange failed after another one was written.
            RuntimeError: an exchange failed before anything was written.
        """
        self._bind(sources, targets)
        self._landed = 0
        try:
            self._exchange()
        except RuntimeError as error:
            kind = Torn if self._landed else RuntimeError
            raise kind(f"exchange {self._landed + 1} of {self.count} failed: {error}") from error
        if self._kept[0]:
            torch._foreach_copy_(*self._kept)

    def _exchange(self) -> None:
        running = self._start(0, self._packed(0)) if self.count else None
        for number in range(1, self.count + 1):
            packed = self._packed(number) if number < self.count else None
            came = _came(running)  # what was sent is free before more is asked for
            if packed is not None:
                running, packed = self._start(number, packed), None
            self._land(number - 1, came)
            self._landed += 1
            _free(came)

    def _packed(self, number: int) -> torch.Tensor:
        way = self._ways[number][0]
        buffer = torch.empty(sum(way.splits), dtype=torch.uint8, device=self.device)
        for run in way.runs:
            torch._foreach_copy_(run.inside(buffer), run.blocks)
        return buffer

    def _start(self, number: int, packed: torch.Tensor) -> InFlight:
        out, into = self._ways[number]
        came = torch.empty(sum(into.splits), dtype=torch.uint8, device=self.device)
        work = dist.all_to_all_single(came, packed, into.splits, out.splits, group=self.group, async_op=True)
        return InFlight(work, packed, came)

    def _land(self, number: int, came: torch.Tensor) -> None:
        for run in self._ways[number][1].runs:
            torch._foreach_copy_(run.blocks, run.inside(came))

    def _bind(self, sources: Locals, targets: Locals) -> None:
        """Make the views, unless they are of these very tensors."""
        if self._ways and all(map(_same, self._bound, (sources, targets))):
            return
        plain = [[None if local is None else as_whole_numbers(local) for local in side] for side in (sources, targets)]
        self._ways = [(self._way(out, plain[0]), self._way(into, plain[1])) for out, into in self._messages]
        kept: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for number, *boxes in self.schedule.kept:
            old, new = [part(_there(side[number]), box) for side, box in zip(plain, boxes)]
            if old.data_ptr() != new.data_ptr():
                kept[0].append(new)
                kept[1].append(old)
        self._kept, self._bound = kept, (sources, targets)

    def _way(self, messages: Messages, locals_: list[torch.Tensor | None]) -> Way:
        splits = [0] * len(self._place)
        for peer, size in messages.sizes.items():
            splits[self._place[peer]] = size
        return Way(splits, _runs(messages.loads, locals_))


def _came(running: InFlight | None) -> torch.Tensor:
    """What an exchange brought, when it is done."""
    if running is None:
        raise AssertionError("an exchange runs until its successor has begun")
    running.work.wait()
    _free(running.sent)
    return running.came


def _free(buffer: torch.Tensor) -> None:
    """Give the memory back now: a thread of the backend may hold the tensor a little longer."""
    buffer.untyped_storage().resize_(0)


def _same(one: Locals, other: Locals) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other))


def _there(local: torch.Tensor | None) -> torch.Tensor:
    if local is None:
        raise AssertionError("a rank has what its schedule moves")
    return local


def as_whole_numbers(local: torch.Tensor) -> torch.Tensor:
    """A view of the same memory with a type that is copied bit by bit."""
    width = _BY_WIDTH[local.element_size()]
    plain = local.detach().resolve_conj().resolve_neg()
    return plain if plain.dtype == width else plain.view(width)


def _runs(loads: list[Load], locals_: list[torch.Tensor | None]) -> list[Run]:
    found: list[Run] = []
    for tensor, box, at in loads:
        local = _there(locals_[tensor])
        block = part(local, box)
        size = box.elements * local.element_size()
        last = found[-1] if found else None
        if last is not None and last.width == local.dtype and last.at + last.size == at:
            last.blocks.append(block)
            found[-1] = last._replace(size=last.size + size)
        else:
            found.append(Run(at, size, local.dtype, [block]))
    return found
