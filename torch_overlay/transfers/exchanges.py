"""Exchanges: carry out a schedule on tensors. Blocks are copied into one flat buffer of bytes, go out in one
all-to-all, and are copied to where they belong. While one all-to-all runs, the next buffer is packed and the last one
is emptied.

Where the backend allows it, large pieces go directly, beside the all-to-all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ..distributed._torch import span
from ..distributed.tensor._runner.exchange import part
from .direct import Letter, Mail, in_turns, large_on
from .runs import Block, Locals, Run, Spread, Wires, copy_all, free, numbers, runs_of, there

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from ._planner.schedule import Messages, Schedule
    from .teams import Team


class Way(NamedTuple):
    """One direction of an exchange, ready to run: bytes for each rank of the group, and blocks; what goes by itself."""

    splits: list[int]
    runs: list[Run | Spread]
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

    def reserve(self, size: int) -> None:
        """So many bytes more are in use, which come from elsewhere; fewer if it is negative."""
        self._make_room(size)
        self._used += size

    def _make_room(self, size: int) -> None:
        while self.kept and self._used + self._idle + size > self._limit:
            self.kept.pop(0)

    def give(self, buffer: torch.Tensor) -> None:
        """It isn't used any more; nor are views of it."""
        self._used -= len(buffer)
        if self._used + self._idle + len(buffer) > self._limit:
            free(buffer)
        else:
            self.kept.append(buffer)

    def forget(self) -> None:
        """Let go of all: of those in use, too, which a backend may write into after an error."""
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
    """

    def __init__(
        self,
        schedule: Schedule,
        count: int,
        team: Team,
        device: torch.device,
        wires: Wires | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        self.count, self.team = count, team
        self._buffers = Buffers(device) if buffers is None else buffers
        large = large_on(team.group, device)
        self._place = {rank: place for place, rank in enumerate(team.ranks)}
        self.schedule = schedule = schedule.in_order(self._place)
        self._messages = [
            (schedule.packed(number, count, large), schedule.landed(number, count, large)) for number in range(count)
        ]
        self.reads, self.written = frozenset(schedule.reads), frozenset[int]()
        self._wires = wires
        self._landed, self._is_written = 0, False
        self._geometry: object = None
        self._ways: list[tuple[Way, Way]] = []
        self._mail: list[Mail] = []
        self._kept: list[tuple[Block, Block]] = []

    @property
    def staging(self) -> int:
        """The most bytes that buffers take at one time."""
        most = 0
        for number, (out, into) in enumerate(self._messages):
            packed, landed = self._messages[number + 1] if number + 1 < self.count else (None, None)
            following = (packed.size if packed else 0, landed.size if landed else 0)
            most = max(most, out.size + into.size + following[0], into.size + sum(following))
        return most

    def run(self, sources: Locals, targets: Locals, sent: Callable[[], None] = lambda: None) -> None:
        """Write what the targets lack, and copy what they have in their sources.

        Args:
            sent: called as soon as no source is read any more.

        Raises:
            Torn: an exchange failed when something was written.
            RuntimeError: an exchange failed before anything was written.
        """
        wires = self._wires or [None] * len(sources)
        sources, targets = numbers(sources, wires), numbers(targets, wires)
        self._find_blocks(sources, targets, wires)
        self._landed, self._is_written = 0, False
        self.written = frozenset(self.schedule.writes)
        try:
            self._exchange(sources, targets, sent)
            self._copy_kept(sources, targets)
            if self._kept or not self.count:
                sent()
        except Exception as error:
            self._buffers.forget()
            # What is in place is copied after the last exchange; there may be none.
            at = f"exchange {self._landed + 1} of {self.count}" if self._landed < self.count else "copying what is here"
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
        with self._span(number, "pack"):
            buffer = self._buffers.take(sum(way.splits))
            for run in way.runs:
                run.pack(sources, buffer)
        return buffer

    def _start(self, number: int, packed: torch.Tensor, sources: Locals, targets: Locals) -> InFlight:
        out, into = self._ways[number]
        self._is_written |= self._mail[number].writes
        self._buffers.reserve(self._mail[number].staged)
        finish = self._mail[number].start(self.team.group, sources, targets)
        came = self._buffers.take(sum(into.splits))
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
        with self._span(number, "wait"):
            running.finish()
            if number == self.count - 1 and not self._kept:
                sent()  # what this rank gets comes later
            running.work.wait()
        self._buffers.reserve(-self._mail[number].staged)
        self._buffers.give(running.sent)
        return running.came

    def _land(self, number: int, came: torch.Tensor, targets: Locals) -> None:
        with self._span(number, "unpack"):
            for run in self._ways[number][1].runs:
                run.land(targets, came)

    def _span(self, number: int, what: str) -> AbstractContextManager[object]:
        return span(f"exchange {number + 1} of {self.count}, {what}")

    def _copy_kept(self, sources: Locals, targets: Locals) -> None:
        by_width: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor, Block]]] = {}
        copied: set[int] = set()
        for before, after in self._kept:
            old, new = before.of(sources), after.of(targets)
            # One address isn't enough: a transposed view, or one of another type, begins there, too.
            if (new.data_ptr(), new.stride(), new.dtype) != (old.data_ptr(), old.stride(), old.dtype):
                by_width.setdefault(old.dtype, []).append((new, old, after))
                copied.add(after.tensor)
        self.written |= copied
        for some in by_width.values():
            self._is_written = True
            copy_all(*map(list, zip(*some)))

    def _find_blocks(self, sources: Locals, targets: Locals, wires: Wires) -> None:
        """Where all blocks lie, unless tensors lie as they did in the last run."""
        geometry = [None if t is None else (t.shape, t.stride(), t.storage_offset()) for t in (*sources, *targets)]
        if geometry == self._geometry:
            return
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
        return Way(splits, runs_of(messages.loads, locals_, wires), letters)
