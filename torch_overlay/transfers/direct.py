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

from ..distributed.tensor._pack import part
from ._planner.schedule import ALIGNED, Direct, Large, Load, blocks
from .runs import Locals, Run, runs_of, there

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup, Work

LARGE = Large(least=128 << 10, most=1 << 20)
WINDOW = 8  # messages
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
    flat: torch.Tensor | None
    runs: list[Run]

    @staticmethod
    def of(message: Direct, locals_: Locals, place: int) -> Letter:
        """The letter for a message, of tensors of whole numbers."""
        tensor, itemsize, box, first, last = message.item
        view = part(there(locals_[tensor]), box)
        flat, runs = None, []
        if view.is_contiguous():
            flat = view.view(-1)[first:last].view(torch.uint8)
        else:
            loads, at = [], 0
            for block in blocks(box, first, last):
                loads.append(Load(tensor, block, at))
                at += block.elements * itemsize
            runs = runs_of(loads, locals_)
        return Letter(place, TAGS + message.tag, message.size, (tensor, box, first, last), flat, runs)

    def copied_out(self) -> torch.Tensor:
        """The bytes, in a buffer."""
        buffer = torch.empty(self.size, dtype=torch.uint8)
        for run in self.runs:
            torch._foreach_copy_(run.inside(buffer), run.blocks)
        return buffer

    def copy_in(self, buffer: torch.Tensor) -> None:
        """Write the bytes of a buffer where they belong."""
        for run in self.runs:
            torch._foreach_copy_(run.blocks, run.inside(buffer))


class Mail:
    """All direct messages of one exchange, to and from this rank.

    Attributes:
        writes: whether some target is written as soon as it has begun.
    """

    def __init__(self, out: Sequence[Letter], into: Sequence[Letter]) -> None:
        self._out = out
        self._straight = [letter for letter in into if letter.flat is not None]
        self._through = [letter for letter in into if letter.flat is None]
        self.writes = bool(self._straight)

    def start(self, group: ProcessGroup) -> Callable[[], None]:
        """Begin with all of them; returns what waits for their end."""
        straight = [group.recv([letter.flat], letter.place, letter.tag) for letter in self._straight]
        through = self._receive_through_window(group)
        sent, copied = [], {}
        for letter in self._out:
            data = letter.flat
            if data is None:
                if letter.key not in copied:
                    copied[letter.key] = letter.copied_out()
                data = copied[letter.key]
            sent.append(group.send([data], letter.place, letter.tag))

        def finish() -> None:
            through()
            for work in (*straight, *sent):
                work.wait()

        return finish

    def _receive_through_window(self, group: ProcessGroup) -> Callable[[], None]:
        if not self._through:
            return lambda: None
        slots = min(WINDOW, len(self._through))
        most = max([letter.size for letter in self._through])
        most += -most % ALIGNED  # where each slot begins
        window = torch.empty(slots * most, dtype=torch.uint8).split(most)
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
                letter.copy_in(slot[: letter.size])
                begin(slot)

        return finish


def in_turns(messages: Sequence[Direct], own: int, places: dict[int, int]) -> list[Direct]:
    """One to or from each rank after the other, the next one of the group first: so that not all begin with one."""
    size = len(places)
    return sorted(messages, key=lambda message: (message.tag, (places[message.peer] - own) % size))
