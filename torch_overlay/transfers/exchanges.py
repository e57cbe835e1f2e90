"""Carry out a schedule on tensors. Start at `Exchanges.run`.

Blocks are copied into one flat buffer of bytes, go out in one all-to-all, and are copied to where they belong. While
one all-to-all runs, the next buffer is packed and the last one is emptied. Where the backend allows it, large pieces go
directly from tensor to tensor, beside the all-to-all.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch._logging import trace_structured
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ..distributed._mesh.text import of_ranks
from ..distributed._torch import span
from ..distributed.tensor._runner.exchange import part
from ._planner.schedule import ROUNDED, Direct, Large, Load, aligned, blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed import ProcessGroup, Work

    from ._planner.routes import Move
    from ._planner.schedule import Item, Messages, Schedule
    from .team import Team
    from .watch import Watch


# --- Blocks in a flat buffer ---
# Blocks of tensors that lie side by side in a flat buffer of bytes, copied there and back by one call.
#
# A block travels as whole numbers of its elements' width, so that every type travels; one that changes its type on
# the way is converted by the copy into the buffer, or out of it. Between two runs of a transfer only places in memory
# are kept, and no tensors: views would keep memory alive that a tensor gave up. With `keep` the views are kept, too
# (see `Views`). Making them is most of what a run of many small tensors costs.


Locals = Sequence["torch.Tensor | None"]  # by the number of the tensor; None where this rank has no part
Wires = Sequence["torch.dtype | None"]  # the types in which tensors travel that change theirs; None: it stays
Copied = tuple[list["torch.Tensor"], list["torch.Tensor"]]  # views of tensors, and of where they are copied

# A type that is copied as it is, for each width of elements.
BY_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


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


class Views:
    """A cache of the strided views that one run of a transfer made of its tensors and buffers, for the next run.

    It is empty unless runs ask for it (``keeps``). A view is used again if its tensor has the same storage, address,
    type, shape and strides as in the run before; any other view is replaced during the next run.

    The address alone isn't enough. A program may free a tensor's memory by resizing its storage to 0, as FSDP does, and
    the allocator may then give the same address to another tensor. The cached view still belongs to the first storage,
    which has no memory any more.
    """

    def __init__(self) -> None:
        self.keeps = False  # what this run makes
        self._state: object = None
        self._lay: list[list[object]] = [[], []]  # by side and number of the tensor
        self._whole: list[list[torch.Tensor | None]] = [[], []]  # as `numbers` gives them
        self.changed: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
        self._of: dict[int, tuple[Copied, torch.Tensor, list[Copied]]] = {}

    def begin(
        self, sources: Locals, targets: Locals, wires: Wires, keeps: bool, state: object = None
    ) -> tuple[Locals, Locals]:
        """The tensors as whole numbers; notes which of them lie otherwise than in the last run.

        Args:
            state: the object of the last run, if the caller knows that all tensors lie as they did then.
        """
        self.keeps = keeps
        if not keeps:
            self.forget()
            return numbers(sources, wires), numbers(targets, wires)
        if state is not None and state is self._state:
            self.changed = frozenset(), frozenset()
            return self._whole[0], self._whole[1]
        found, changed = [], []
        for side, locals_ in enumerate((sources, targets)):
            lay = [None if local is None else _lies(local) for local in locals_]
            before = self._lay[side] or [_UNKNOWN] * len(lay)
            other = [n for n, (old, new) in enumerate(zip(before, lay, strict=True)) if old != new or new is _UNKNOWN]
            whole = self._whole[side] or [None] * len(lay)
            for number, local in zip(other, numbers([locals_[n] for n in other], [wires[n] for n in other])):
                whole[number] = local
            self._lay[side], self._whole[side] = lay, whole
            found.append(whole)
            changed.append(frozenset(other))
        self.changed, self._state = (changed[0], changed[1]), state
        return found[0], found[1]

    def drop_blocks(self) -> None:
        """Let go of the views of blocks, whose places are found anew."""
        self._of = {}

    def forget(self) -> None:
        """Let go of all of them."""
        self._of, self._state = {}, None
        self._lay, self._whole, self.changed = [[], []], [[], []], (frozenset(), frozenset())

    def of(self, copies: Copies, side: int, locals_: Locals, buffer: torch.Tensor) -> list[Copied]:
        """The views of the blocks and of their places in the buffer, as `Copies.views` gives them."""
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


_UNKNOWN = object()  # of what may be another copy in each run


def _lies(local: torch.Tensor) -> object:
    if isinstance(local, AsyncCollectiveTensor) or local.is_conj() or local.is_neg():
        return _UNKNOWN
    return local.data_ptr(), local.untyped_storage()._cdata, local.dtype, local.shape, local.stride()


@dataclass(slots=True)
class Run:
    """Blocks of one width that follow one another in a buffer.

    Attributes:
        at, size: where they lie, in bytes.
        width: of an element, as a type; of one that changes its type, the type in which it travels.
    """

    at: int
    size: int
    width: torch.dtype
    blocks: list[Block]

    def inside(self, buffer: torch.Tensor, views: list[torch.Tensor]) -> list[torch.Tensor]:
        flat = buffer.narrow(0, self.at, self.size).view(self.width)
        return torch._C._nn.unflatten_dense_tensors(flat, views)  # type: ignore[no-any-return]


@dataclass(slots=True)
class Spread:
    """Blocks of one width whose parts lie in several messages.

    Attributes:
        places: where the parts lie in the buffer, read as a tensor of this width. Each place is a strided view of the
            buffer: its first dim goes over blocks, its second over the parts of a block.
    """

    width: torch.dtype
    blocks: list[Block]
    places: list[Block]

    def inside(self, buffer: torch.Tensor, views: list[torch.Tensor]) -> list[torch.Tensor]:
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


class Copies:
    """All blocks of one direction of an exchange, or of one direct message, copied by as few calls as go."""

    def __init__(self, runs: Sequence[Run | Spread]) -> None:
        self._runs = runs
        self.blocks = [block for run in runs for block in run.blocks]

    def pack(self, locals_: Locals, buffer: torch.Tensor, views: Views | None = None) -> None:
        """Copy the blocks into the buffer."""
        for own, inside in self.views(locals_, buffer) if views is None else views.of(self, 0, locals_, buffer):
            torch._foreach_copy_(inside, own)

    def land(self, locals_: Locals, buffer: torch.Tensor, views: Views | None = None) -> None:
        """Copy the blocks out of the buffer."""
        for own, inside in self.views(locals_, buffer) if views is None else views.of(self, 1, locals_, buffer):
            torch._foreach_copy_(own, inside)

    def views(self, locals_: Locals, buffer: torch.Tensor) -> list[Copied]:
        """The views of the blocks, and those of their places in the buffer: a pair of lists for each call."""
        own = [block.of(locals_) for block in self.blocks]
        return in_groups(self.blocks, own, self.inside(buffer, own))

    def inside(self, buffer: torch.Tensor, own: list[torch.Tensor]) -> list[torch.Tensor]:
        """Views of the places of the blocks in the buffer."""
        found: list[torch.Tensor] = []
        for run in self._runs:
            found += run.inside(buffer, own[len(found) : len(found) + len(run.blocks)])
        return found


def in_groups(blocks: Sequence[Block], own: list[torch.Tensor], other: list[torch.Tensor]) -> list[Copied]:
    """Views of blocks and of where they are copied, in lists for `torch._foreach_copy_`.

    A GPU copies a list by one kernel if all its tensors are dense, and each side is of one type; it copies tensor by
    tensor if a single one is not. So dense blocks are grouped by their types there, and the rest is one list. The CPU
    always copies tensor by tensor, and all is one list.
    """
    if not own or own[0].is_cpu:
        return [(own, other)] if own else []
    found: dict[object, Copied] = {}
    for block, one, two in zip(blocks, own, other):
        group = found.setdefault((one.dtype, two.dtype) if block.is_dense else None, ([], []))
        group[0].append(one)
        group[1].append(two)
    return [*found.values()]


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
    width = BY_WIDTH[local.element_size()]
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


# --- Large pieces, which go by themselves ---
# Direct messages: large pieces, which go from tensor to tensor and aren't packed with others.
#
# A piece that lies in one stretch of memory is sent, or written, where it is. One that doesn't is copied out once for
# all who get it, and what comes for one passes through a small window that is used again and again: memory that was
# touched before is several times as fast as new memory from the system.


# On 8 gloo ranks a strided piece of 128 KB takes twice as long as packed. From 256 KB on pieces that lie in one stretch
# save a copy for each rank that gets them: with a least of 1 MB a relay took 1.27 times as long.
LARGE = Large(least=256 << 10, most=1 << 20)
IN_FLIGHT = 8  # messages
GIVE_UP = timedelta(seconds=2)  # in which a wait in gloo fails by itself after its connections were closed
TAGS = 1 << 20  # above those that a program that uses a mesh's group may have under way


def large_on(team: Team) -> Large | None:
    """What goes directly: on gloo, where a rank may send before it receives. Elsewhere all goes in the all-to-all."""
    return LARGE if team.is_on_gloo else None


class Letter(NamedTuple):
    """A direct message and this rank's memory for it.

    Attributes:
        place: of the other rank in the group.
        item: what it carries; equal if the same elements of one tensor go to several ranks.
        flat: where its bytes lie, one after the other; None if they don't.
        copies: else where they lie.
    """

    place: int
    tag: int
    item: Item
    flat: Block | None
    copies: Copies | None

    @property
    def size(self) -> int:
        """In bytes."""
        return self.item.step

    @staticmethod
    def of(message: Direct, locals_: Locals, wires: Wires, place: int) -> Letter:
        """The letter for a message, of tensors as `numbers` gives them."""
        (tensor,), itemsize, box, first, last = message.item
        view = part(there(locals_[tensor]), box)
        flat = copies = None
        if view.is_contiguous() and wires[tensor] in (None, view.dtype):
            # Not the strides that it says: of one element they may be any.
            flat = Block(tensor, (last - first,), (1,), view.storage_offset() + first)
        else:
            loads, at = [], 0
            for block in blocks(box, first, last):
                loads.append(Load((tensor,), block, at, 0))
                at += block.elements * itemsize
            copies = Copies(runs_of(loads, locals_, wires))
        return Letter(place, TAGS + message.tag, message.item, flat, copies)


class Mail:
    """All direct messages of one exchange, to and from this rank.

    Attributes:
        writes: whether some target is written as soon as it has begun.
    """

    def __init__(self, out: Sequence[Letter], into: Sequence[Letter]) -> None:
        self._out = out
        self._straight = [(letter, letter.flat) for letter in into if letter.flat is not None]
        self._through = [letter for letter in into if letter.flat is None]
        self.writes = bool(self._straight)
        copied = {letter.item: letter for letter in out if letter.copies is not None}
        self._copied = sorted(copied.values(), key=lambda letter: -letter.item.itemsize)  # so that each lies aligned

    def start(self, team: Team, buffers: Buffers, sources: Locals, targets: Locals) -> Callable[[], None]:
        """Begin with all of them, of tensors of whole numbers; returns what waits for their end."""
        if not self._out and not self._straight and not self._through:
            return lambda: None
        straight, group = [], team.group
        if group is None:
            raise AssertionError("messages go by a group")
        for letter, flat in self._straight:
            straight.append(group.recv([flat.of(targets).view(torch.uint8)], letter.place, letter.tag))
        through = self._receive_through_window(team, group, buffers, targets)
        sizes = [letter.size for letter in self._copied]
        buffer = buffers.take(sum(sizes))
        places = buffer.split(sizes)
        copied = {letter.item: place for letter, place in zip(self._copied, places)}
        copies = {letter.item: letter.copies for letter in self._copied}
        sent = []
        for letter in self._out:
            if letter.flat is not None:
                data = letter.flat.of(sources).view(torch.uint8)
            else:
                data = copied[letter.item]
                if (copy := copies.pop(letter.item, None)) is not None:  # just before it is sent: others wait for it
                    copy.pack(sources, data)
            sent.append(group.send([data], letter.place, letter.tag))

        def finish() -> None:
            through()
            for message in (*straight, *sent):
                team.wait(message)
            buffers.give(buffer)

        return finish

    @property
    def _window(self) -> list[int]:
        """The length of each slot."""
        most = max([letter.size for letter in self._through], default=0)
        return [aligned(most)] * min(IN_FLIGHT, len(self._through))  # where each slot begins

    def _receive_through_window(
        self, team: Team, group: ProcessGroup, buffers: Buffers, targets: Locals
    ) -> Callable[[], None]:
        if not self._through:
            return lambda: None
        slots = self._window
        window = buffers.take(sum(slots))
        begun: deque[tuple[Letter, torch.Tensor, Work]] = deque()
        waiting = iter(self._through)

        def begin(slot: torch.Tensor) -> None:
            letter = next(waiting, None)
            if letter is not None:
                data = slot[: letter.size]
                begun.append((letter, slot, group.recv([data], letter.place, letter.tag)))

        for slot in window.split(slots):
            begin(slot)

        def finish() -> None:
            while begun:
                letter, slot, message = begun.popleft()
                team.wait(message)
                if letter.copies is not None:
                    letter.copies.land(targets, slot[: letter.size])
                begin(slot)
            buffers.give(window)

        return finish


def in_turns(messages: Sequence[Direct], own: int, places: dict[int, int]) -> list[Direct]:
    """One to or from each rank after the other, the next one of the group first: so that not all begin with one."""
    size = len(places)
    return sorted(messages, key=lambda message: (message.tag, (places[message.peer] - own) % size))


class Way(NamedTuple):
    """One direction of an exchange, ready to run: bytes for each rank of the group, and blocks; what goes by itself."""

    splits: list[int]
    copies: Copies
    letters: list[Letter]


class InFlight(NamedTuple):
    """An exchange that has begun; it holds the buffers until it is done."""

    work: dist.Work
    sent: torch.Tensor
    came: torch.Tensor
    finish: Callable[[], None]


class Buffers:
    """Flat buffers of bytes. One that is given back is free at once; or kept for the next one of its length, as
    long as all that are kept or in use take no more than a limit.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kept: list[torch.Tensor] = []
        self._limit = self._used = 0

    def keep(self, limit: int) -> None:
        """Keep from now on, up to so many bytes. On a GPU none is kept: torch's allocator keeps them, and knows which
        stream still reads them."""
        self._limit = limit if self.device.type == "cpu" else 0
        self._make_room(0)

    def take(self, size: int) -> torch.Tensor:
        """One of so many bytes."""
        fit = next((each for each in self.kept if len(each) == size), None)
        if fit is None:
            self._make_room(size)
            fit = torch.empty(size, dtype=torch.uint8, device=self.device)
        else:
            self.kept = [each for each in self.kept if each is not fit]
        self._used += size
        return fit

    def _make_room(self, size: int) -> None:
        while self.kept and self._used + self._idle + size > self._limit:
            free(self.kept.pop(0))  # kept views of it would hold its memory

    def give(self, buffer: torch.Tensor) -> None:
        """It isn't used any more; nor are views of it."""
        self._used -= len(buffer)
        if self._used + self._idle + len(buffer) > self._limit:
            free(buffer)
        else:
            self.kept.append(buffer)

    def forget(self) -> None:
        """Let go of all: of those in use, too, which a backend may write into after an error."""
        for buffer in self.kept:
            free(buffer)
        self.kept, self._used = [], 0

    @property
    def _idle(self) -> int:
        return sum(map(len, self.kept))


class Torn(RuntimeError):
    """An exchange failed, and some of the targets were written before."""


class Exchanges:
    """All exchanges of a transfer on one rank.

    Args:
        wires: the types in which tensors travel that change theirs, by the number of the tensor; none do if not given.
        buffers: where its buffers come from; none is kept if not given.

    Attributes:
        count: how many there are, the same on every rank.
        reads: numbers of the tensors whose sources this rank sends or copies.
        written: numbers of those whose targets the last run wrote, or began to write.
        label: what errors and profiles say before the number of an exchange.
    """

    label = ""

    def __init__(
        self,
        schedule: Schedule,
        count: int,
        team: Team,
        wires: Wires | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        self.count, self.team = count, team
        self._buffers = Buffers(team.device) if buffers is None else buffers
        self._large = large = large_on(team)
        self._place = {rank: place for place, rank in enumerate(team.ranks)}
        self.schedule = schedule = schedule.in_order(self._place)
        self._messages = [
            (schedule.packed(number, count, large), schedule.landed(number, count, large)) for number in range(count)
        ]
        self.reads, self.written = frozenset(schedule.reads), frozenset[int]()
        self._writes = frozenset(schedule.writes)
        self._wires = wires
        self._landed, self._is_written = 0, False
        self._geometry: object = None
        self._ways: list[tuple[Way, Way]] = []
        self._mail: list[Mail] = []
        self._kept: list[tuple[Block, Block]] = []
        self._views = Views()
        self._watch: Watch | None = None
        self._ends: list[torch.Event] = []
        self._kept_views: tuple[frozenset[int], list[Copied]] | None = None

    @property
    def staging(self) -> int:
        """The most bytes that buffers take at one time."""
        most = 0
        for number, (out, into) in enumerate(self._messages):
            packed, landed = self._messages[number + 1] if number + 1 < self.count else (None, None)
            following = (packed.size if packed else 0, landed.size if landed else 0)
            most = max(most, out.size + into.size + following[0], into.size + sum(following))
        return most

    def run(
        self,
        sources: Locals,
        targets: Locals,
        sent: Callable[[], None] = lambda: None,
        keeps: bool = False,
        watch: Watch | None = None,
        state: object = None,
    ) -> None:
        """Write what the targets lack, and copy what they have in their sources.

        Args:
            keeps: keep the views for the next run, and with them the memory of these tensors.
            sent: called as soon as no source is read any more.
            watch: hears of each step.
            state: the object of the last run, if all tensors are known to lie as they did then. With another one, or
                none, each is looked at.

        Raises:
            Torn: an exchange failed when something was written.
            RuntimeError: an exchange failed before anything was written.
        """
        self._watch = watch
        wires = self._wires or [None] * len(sources)
        sources, targets = self._views.begin(sources, targets, wires, keeps, state)
        if self._geometry is None or not keeps or any(self._views.changed):
            self._find_blocks(sources, targets, wires)
            self._kept_views = None
        self._landed, self._is_written = 0, False
        self.written = self._writes
        try:
            self._exchange(sources, targets, sent)
            self._copy_kept(sources, targets)
            self._wait_for_device()
            if self._kept or not self.count:
                sent()
        except Exception as error:
            self.forget()
            self._buffers.forget()
            # What is in place is copied after the last exchange; there may be none.
            at = (
                f"{self.label}exchange {self._landed + 1} of {self.count}"
                if self._landed < self.count
                else "copying what is here"
            )
            said = f"{at} failed: {error}"
            if self._is_written:
                raise Torn(said) from error
            if isinstance(error, RuntimeError):
                raise RuntimeError(said) from error
            raise

    def _exchange(self, sources: Locals, targets: Locals, sent: Callable[[], None]) -> None:
        running = self._start(0, self._packed(0, sources), sources, targets) if self.count else None
        for number in range(1, self.count + 1):
            packed = self._packed(number, sources) if number < self.count else None
            came = self._came(number - 1, running, sent)
            running = None  # what was sent is free before more is asked for
            if packed is not None:
                running, packed = self._start(number, packed, sources, targets), None
            self._is_written = True
            self._land(number - 1, came, targets)
            self._landed = number
            self._buffers.give(came)

    def _packed(self, number: int, sources: Locals) -> torch.Tensor:
        way = self._ways[number][0]
        with self._step(number, "pack"):
            buffer = self._buffers.take(sum(way.splits))
            way.copies.pack(sources, buffer, self._views)
        return buffer

    def _start(self, number: int, packed: torch.Tensor, sources: Locals, targets: Locals) -> InFlight:
        out, into = self._ways[number]
        self._is_written |= self._mail[number].writes
        came = self._buffers.take(sum(into.splits))
        with self._step(number, "send", waits=True):  # it fails where a connection broke
            finish = self._mail[number].start(self.team, self._buffers, sources, targets)
            work = self._swap(came, packed, into.splits, out.splits)
        return InFlight(work, packed, came, finish)

    def _swap(self, came: torch.Tensor, packed: torch.Tensor, into: Sequence[int], out: Sequence[int]) -> dist.Work:
        if not len(packed) and len(came) and self.team.is_fake:
            # It refuses to send nothing, and brings nothing: a byte goes to oneself, and what came stays as it is.
            own = [int(rank == self.team.rank) for rank in self._place]
            came, packed = came.new_empty(len(came) + 1), packed.new_empty(1)
            into, out = [size + one for size, one in zip(into, own, strict=True)], own
        exchange = self.team.call(dist.all_to_all_single)
        return exchange(came, packed, [*into], [*out], group=self.team.group, async_op=True)

    def _came(self, number: int, running: InFlight | None, sent: Callable[[], None]) -> torch.Tensor:
        """What an exchange brought in its buffer, when it is done."""
        if running is None:
            raise AssertionError("an exchange runs until its successor has begun")
        with self._step(number, "wait", waits=True):
            running.finish()
            if number == self.count - 1 and not self._kept:
                sent()  # what this rank gets comes later
            self._wait(running.work)
            if self.team.device.type != "cpu" and self._watch is not None:
                self._ends.append(torch.accelerator.current_stream(self.team.device).record_event())
        self._buffers.give(running.sent)
        return running.came

    def _wait(self, work: dist.Work) -> None:
        """Wait until an all-to-all has ended.

        A rank that was stopped (SIGSTOP) within one, and woke when all others had closed their connections, was seen to
        wait in gloo for a send that no longer went anywhere, until the group's own timeout, and closing its connections
        didn't end that. So a wait in gloo is given up some seconds after they were closed.

        Raises:
            RuntimeError: it failed, or was given up.
        """
        if self._watch is None or not self.team.is_on_gloo:
            work.wait()
            return
        gives_up = False
        while True:
            try:
                work.wait(GIVE_UP)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
                if gives_up:
                    self.team.never_free()
                    raise
                gives_up = self._watch.is_cut

    def _land(self, number: int, came: torch.Tensor, targets: Locals) -> None:
        with self._step(number, "unpack"):
            self._ways[number][1].copies.land(targets, came, self._views)

    @contextmanager
    def _step(self, number: int, what: str, waits: bool = False) -> Iterator[None]:
        text = f"{self.label}exchange {number + 1} of {self.count}, {what}"
        if self._watch is not None:
            self._watch.enter(text, waits)
        with span(text):
            yield
        if waits and self._watch is not None:
            self._watch.came()

    def _wait_for_device(self) -> None:
        """Wait until the exchanges have ended on the device.

        There `wait` only puts them in order. A rank that died would leave this one in a kernel, and the program would
        go on as if its targets were new.
        """
        ends, self._ends = self._ends, []
        for number, end in enumerate(ends):
            with self._step(number, "on the device", waits=True):
                end.synchronize()
        if ends and self._watch is not None:
            self._watch.enter("the end")  # raises if it was aborted

    def _copy_kept(self, sources: Locals, targets: Locals) -> None:
        if self._kept_views is None:
            moved = []
            for before, after in self._kept:
                old, new = before.of(sources), after.of(targets)
                # One address isn't enough: a transposed view, or one of another type, begins there, too.
                if (new.data_ptr(), new.stride(), new.dtype) != (old.data_ptr(), old.stride(), old.dtype):
                    moved.append((after, new, old))
            blocks, to, given = ([*column] for column in zip(*moved)) if moved else ([], [], [])
            self._kept_views = self._writes.union(block.tensor for block in blocks), in_groups(blocks, to, given)
        self.written, groups = self._kept_views
        for to, given in groups:
            self._is_written = True
            torch._foreach_copy_(to, given)
        if not self._views.keeps:
            self._kept_views = None

    def forget(self) -> None:
        """Keep no view."""
        self._views.forget()
        self._kept_views = None

    def _find_blocks(self, sources: Locals, targets: Locals, wires: Wires) -> None:
        """Where all blocks lie, unless tensors lie as they did in the last run."""
        geometry = [None if t is None else (t.shape, t.stride(), t.storage_offset()) for t in (*sources, *targets)]
        if geometry == self._geometry:
            return
        self._views.drop_blocks()
        self._ways = [(self._way(out, sources, wires), self._way(into, targets, wires)) for out, into in self._messages]
        self._mail = [Mail(out.letters, into.letters) for out, into in self._ways]
        self._kept = []
        for number, *boxes in self.schedule.kept:
            views = [part(there(side[number]), box) for side, box in zip((sources, targets), boxes)]
            is_dense = all(view.is_contiguous() for view in views)
            old, new = [Block.at(number, view, is_dense) for view in views]
            self._kept.append((old, new))
        self._geometry = geometry

    def _way(self, messages: Messages, locals_: Locals, wires: Wires) -> Way:
        splits = [0] * len(self._place)
        for peer, size in messages.sizes.items():
            splits[self._place[peer]] = size
        own = self._place[self.team.rank]
        direct = in_turns(messages.direct, own, self._place)
        letters = [Letter.of(message, locals_, wires, self._place[message.peer]) for message in direct]
        return Way(splits, Copies(runs_of(messages.loads, locals_, wires)), letters)


# --- How many exchanges there are, and what is logged of a plan ---


plan_logger = logging.getLogger("torch_overlay.transfers")


def log_plan(name: str, describe: Callable[[], str]) -> None:
    """A DEBUG line, and an artifact that tlparse shows by this name.

    Args:
        describe: gives the plan in words; called only if somebody wants to know.
    """
    if plan_logger.isEnabledFor(logging.DEBUG):
        plan_logger.debug("planned %s", describe())
    about = {"name": name, "encoding": "string"}
    trace_structured("artifact", lambda: about, payload_fn=describe, expect_trace_id=False)


Traffic = dict[int, tuple[int, int, int]]


def most_bytes(moves: Iterable[Move], ranks: Sequence[int]) -> int:
    """Bytes that no rank has more of to send and to get in these moves; every rank finds the same."""
    most = ROUNDED * 2 * len(ranks)
    for move in moves:
        most += move.itemsize * (len(ranks) * move.source.regions.most + move.target.regions.most)
    return most


def agreed_count(schedule: Schedule, budget: int, team: Team, is_wrong: bool = False) -> tuple[int, Traffic]:
    """How many exchanges there are: as many as the rank needs that needs most, none if all is in place. And by rank,
    what it sends, what it gets, and the exchanges that it needs.

    Collective. What is wrong on a rank travels with it, so that no rank begins with what some of them can't do.

    Raises:
        RuntimeError: something is wrong on some rank; on all of them.
        ValueError: the budget is too small for some rank; on all of them.
    """
    problem = ""
    try:
        least = schedule.least(budget)
    except ValueError as error:
        least, problem = -1, str(error)
    said = team.gather([int(is_wrong), schedule.sent, schedule.received, least])
    wrong = [rank for rank, (first, *_) in zip(team.ranks, said) if first]
    if wrong:
        raise RuntimeError(f"Nothing was redistributed: {of_ranks(wrong)} can't.")
    traffic: Traffic = {rank: (out, into, needed) for rank, (_, out, into, needed) in zip(team.ranks, said)}
    small = [rank for rank, (*_, needed) in traffic.items() if needed < 0]
    if small:
        raise ValueError(problem or f"A budget of {budget} bytes is too small for {of_ranks(small)}.")
    is_idle = not any(sent for sent, *_ in traffic.values())
    return 0 if is_idle else max(needed for *_, needed in traffic.values()), traffic
