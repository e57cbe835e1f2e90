"""Direct messages: large pieces, which go from tensor to tensor and aren't packed with others.

A piece that lies in one stretch of memory is sent, or written, where it is. One that doesn't is copied out once for all
who get it, and what comes for one passes through a small window that is used again and again: memory that was touched
before is several times as fast as new memory from the system.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..distributed.tensor._runner.exchange import part
from ._planner.schedule import ALIGNED, Direct, Large, Load, blocks
from .runs import Block, Locals, Run, Spread, Wires, runs_of, there

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup, Work

LARGE = Large(least=128 << 10, most=1 << 20)
IN_FLIGHT = 8  # messages
TAGS = 1 << 20  # above those that a program that uses a mesh's group may have under way


def large_on(group: ProcessGroup | None, device: torch.device) -> Large | None:
    """What goes directly: on gloo, where a rank may send before it receives. Elsewhere all goes in the all-to-all."""
    if group is None or device.type != "cpu":
        return None
    try:
        return LARGE if group._get_backend(device).name() == "gloo" else None
    except RuntimeError:
        return None


class Letter(NamedTuple):
    """A direct message and this rank's memory for it.

    Attributes:
        place: of the other rank in the group.
        key: equal if the same elements of one tensor are sent.
        flat: where its bytes lie, one after the other; None if they don't.
        runs: else where they lie.
    """

    place: int
    tag: int
    size: int
    key: object
    flat: Block | None
    runs: list[Run | Spread]

    @staticmethod
    def of(message: Direct, locals_: Locals, wires: Wires, place: int) -> Letter:
        """The letter for a message, of tensors as `numbers` gives them."""
        (tensor,), itemsize, box, first, last = message.item
        view = part(there(locals_[tensor]), box)
        flat, runs = None, []
        if view.is_contiguous() and wires[tensor] in (None, view.dtype):
            # Not the strides that it says: of one element they may be any.
            flat = Block(tensor, (last - first,), (1,), view.storage_offset() + first)
        else:
            loads, at = [], 0
            for block in blocks(box, first, last):
                loads.append(Load((tensor,), block, at, 0))
                at += block.elements * itemsize
            runs = runs_of(loads, locals_, wires)
        return Letter(place, TAGS + message.tag, message.size, (tensor, box, first, last), flat, runs)

    def copied_out(self, locals_: Locals) -> torch.Tensor:
        """The bytes, in a buffer."""
        buffer = _buffer(self.size)
        for run in self.runs:
            run.pack(locals_, buffer)
        return buffer


def _buffer(size: int) -> torch.Tensor:
    """Bytes in the memory of the host, also where the program makes its tensors elsewhere by default."""
    return torch.empty(size, dtype=torch.uint8, device="cpu")


class Mail:
    """All direct messages of one exchange, to and from this rank.

    Attributes:
        writes: whether some target is written as soon as it has begun.
        staged: the bytes of the copies that are sent, and of the window.
    """

    def __init__(self, out: Sequence[Letter], into: Sequence[Letter]) -> None:
        self._out = out
        self._straight = [(letter, letter.flat) for letter in into if letter.flat is not None]
        self._through = [letter for letter in into if letter.flat is None]
        self.writes = bool(self._straight)
        copied = {letter.key: letter.size for letter in out if letter.flat is None}
        self.staged = sum(copied.values()) + sum(self._window)

    def start(self, group: ProcessGroup, sources: Locals, targets: Locals) -> Callable[[], None]:
        """Begin with all of them, of tensors of whole numbers; returns what waits for their end."""
        straight = []
        for letter, flat in self._straight:
            straight.append(group.recv([flat.of(targets).view(torch.uint8)], letter.place, letter.tag))
        through = self._receive_through_window(group, targets)
        sent, copied = [], {}
        for letter in self._out:
            if letter.flat is not None:
                data = letter.flat.of(sources).view(torch.uint8)
            else:
                if letter.key not in copied:
                    copied[letter.key] = letter.copied_out(sources)
                data = copied[letter.key]
            sent.append(group.send([data], letter.place, letter.tag))

        def finish() -> None:
            through()
            for work in (*straight, *sent):
                work.wait()

        return finish

    @property
    def _window(self) -> list[int]:
        """The length of each slot."""
        most = max([letter.size for letter in self._through], default=0)
        return [most + -most % ALIGNED] * min(IN_FLIGHT, len(self._through))  # where each slot begins

    def _receive_through_window(self, group: ProcessGroup, targets: Locals) -> Callable[[], None]:
        if not self._through:
            return lambda: None
        slots = self._window
        window = _buffer(sum(slots)).split(slots)
        begun: deque[tuple[Letter, torch.Tensor, Work]] = deque()
        waiting = iter(self._through)

        def begin(slot: torch.Tensor) -> None:
            letter = next(waiting, None)
            if letter is not None:
                data = slot[: letter.size]
                begun.append((letter, slot, group.recv([data], letter.place, letter.tag)))

        for slot in window:
            begin(slot)

        def finish() -> None:
            while begun:
                letter, slot, work = begun.popleft()
                work.wait()
                for run in letter.runs:
                    run.land(targets, slot[: letter.size])
                begin(slot)

        return finish


def in_turns(messages: Sequence[Direct], own: int, places: dict[int, int]) -> list[Direct]:
    """One to or from each rank after the other, the next one of the group first: so that not all begin with one."""
    size = len(places)
    return sorted(messages, key=lambda message: (message.tag, (places[message.peer] - own) % size))
