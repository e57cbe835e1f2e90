"""A checkpoint of safetensors files as the source of a `Transfer`.

The ranks that give the checkpoint are its readers. All of them read the headers, and each gets an equal share of the
bytes, in the order of the files. A share is cut into rounds: in one round a reader fills a buffer of half of the
budget, and what is in it goes to the targets as pieces of any other source do. So each byte is read once, and no reader
has more of the checkpoint in memory than a round.

Start reading at `Contents.shares` for who reads what, and at `Rounds.run` for a run; the files are in `tensor_files`.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..distributed._mesh.text import of_ranks
from ..distributed._torch import span
from ..distributed.tensor._planner.regions import Box
from ._planner.schedule import aligned, blocks
from .exchanges import Torn
from .tensor_files import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from .exchanges import Exchanges, Locals
    from .tensor_files import Files
    from .watch import Watch

VECTORS = 512  # buffers of one preadv; Linux takes 1,024
ROWS = 8  # of a round, at least, for cuts to be between rows


# --- Who reads what, as all ranks find it ---


class Part(NamedTuple):
    """Elements `first` to before `last` of a tensor, by its number; they lie one after the other in the file."""

    entry: int
    first: int
    last: int


class Contents:
    """A checkpoint as all ranks know it.

    Attributes:
        ranks: the readers, ascending.
        entries: its tensors, in the order of their bytes.
        numbers: by name of the target, the number of the tensor that goes there.
    """

    def __init__(self, data: Mapping[str, Any], ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        rows = data["tensors"]
        self.entries = [Entry(name, dtype, tuple(shape), *where) for name, dtype, shape, *where, _ in rows]
        self.numbers = {name: number for number, (*_, names) in enumerate(rows) for name in names}

    @staticmethod
    def of(said: Mapping[int, Any]) -> Contents | None:
        """What readers said, by rank; None if there are none.

        Raises:
            ValueError: they see different files, or give different names; tells the file, and the tensor.
        """
        if not said:
            return None
        first, *others = sorted(said)
        for other in others:
            if said[other] is not said[first] and said[other] != said[first]:
                raise ValueError(
                    f"{of_ranks([first, other])} see different checkpoints: {_difference(said[first], said[other])}."
                )
        return Contents(said[first], [first, *others])

    def shares(self, names: Iterable[str], room: int) -> list[list[list[Part]]]:
        """By place of the reader, and by round, what it reads for tensors with these names.

        Each reader gets as many bytes, one after the other in the order of the files, and of them as many in a round
        as go into `room` bytes where each part begins aligned.
        """
        numbers = sorted({self.numbers[name] for name in names})
        sizes = [self.entries[number].elements * self.entries[number].itemsize for number in numbers]
        readers = len(self.ranks)
        edges = [sum(sizes) * place // readers for place in range(readers + 1)]
        parts: list[list[Part]] = [[] for _ in self.ranks]
        begin = place = 0
        for number, size in zip(numbers, sizes):
            if not size:
                parts[0].append(Part(number, 0, 0))  # nobody reads it, and its name is known
                continue
            while edges[place + 1] <= begin:
                place += 1
            reader = place
            while reader < readers and edges[reader] < begin + size:
                first, last = (self._cut(number, edge - begin, size, room) for edge in edges[reader : reader + 2])
                if first < last:
                    parts[reader].append(Part(number, first, last))
                reader += 1
            begin += size
        return [self._rounds(some, room) for some in parts]

    def _cut(self, number: int, at: int, size: int, room: int) -> int:
        """The element at which a tensor of so many bytes is cut that contains byte `at`: at the begin of a row."""
        entry = self.entries[number]
        if at <= 0:
            return 0
        return entry.elements if at >= size else _whole_rows(entry, at // entry.itemsize, room)

    def _rounds(self, parts: Iterable[Part], room: int) -> list[list[Part]]:
        found, left = list[list[Part]]([[]]), room
        for number, first, last in parts:
            entry = self.entries[number]
            if first == last:
                found[-1].append(Part(number, first, last))
            while first < last:
                upto = min(last, first + left // entry.itemsize)
                if upto < last:
                    upto = _whole_rows(entry, upto, room)
                if upto <= first:
                    found.append([])
                    left = room
                    continue
                found[-1].append(Part(number, first, upto))
                left -= aligned((upto - first) * entry.itemsize)
                first = upto
        return found

    def boxes(self, part: Part) -> list[Box]:
        """A part as boxes of its tensor, in the order of its bytes."""
        shape = self.entries[part.entry].shape
        whole = Box((0,) * len(shape), shape)
        return blocks(whole, part.first, part.last) if part.first < part.last else [whole]

    def read_boxes(self, shares: Iterable[Iterable[Iterable[Part]]]) -> dict[int, dict[int, list[Box]]]:
        """By number of the entry and by reader, the boxes that the reader reads of it, given the shares of all."""
        found: dict[int, dict[int, list[Box]]] = {}
        for reader, rounds in zip(self.ranks, shares):
            for part in itertools.chain.from_iterable(rounds):
                found.setdefault(part.entry, {}).setdefault(reader, []).extend(self.boxes(part))
        return found


def _whole_rows(entry: Entry, element: int, room: int) -> int:
    """The begin of the row of dim 0 that has an element; if several rows fit into a round, so that it is cut into fewer
    boxes. Else the element."""
    row = entry.elements // entry.shape[0] if entry.shape else 1
    return element // row * row if row * entry.itemsize * ROWS <= room else element


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first thing in which two checkpoints differ, in words."""
    for name, row, another in _differing(one["tensors"], other["tensors"]):
        if row is None or another is None:
            file = one["files"][row[2]][0] if row is not None else other["files"][another[2]][0]
            return f"only one of them has {name!r}, of {file}"
        said = [f"{dtype} of shape {shape} at byte {at} for {names}" for dtype, shape, _, at, names in (row, another)]
        if said[0] != said[1]:
            return f"{name!r} of {one['files'][row[2]][0]} is {said[0]}, and {said[1]}"
    for name, row, another in _differing(one["files"], other["files"]):
        if row is None or another is None:
            return f"only one of them has the file {name}"
        return f"{name} has {row[0]} bytes, and {another[0]}, or another header"
    return "their tensors come in another order"


def _differing(rows: Sequence[Any], others: Sequence[Any]) -> Iterator[tuple[str, Any, Any]]:
    """By the name with which rows begin, those that differ: the rest of both, None where there is none."""
    one, other = ({name: rest for name, *rest in some} for some in (rows, others))
    for name in sorted({*one, *other}):
        if one.get(name) != other.get(name):
            yield name, one.get(name), other.get(name)


# --- A run ---


class Local(NamedTuple):
    """A box of a part, which is the local tensor of a piece.

    Attributes:
        begin: of its first element in the part.
        shape: of the box.
    """

    part: Part
    begin: int
    shape: tuple[int, ...]


class Round(NamedTuple):
    """What is moved in one round of a plan.

    Attributes:
        places: of its tensors in the plan.
        locals: by place in `places`, what this rank has of the source.
        exchanges: how it is moved.
    """

    places: list[int]
    locals: dict[int, Local]
    exchanges: Exchanges

    def parts(self) -> list[Part]:
        """What is read: what goes somewhere, in the order of the bytes."""
        return sorted({local.part for place, local in self.locals.items() if place in self.exchanges.reads})


class Rounds:
    """The rounds of a plan, one after the other, with what a run asks of `Exchanges`.

    Args:
        files: what this rank reads from; None if it reads nothing.

    Attributes:
        reads: none: what is read is no tensor of the program's.
        written: as of `Exchanges`, by place in the plan.
    """

    def __init__(self, rounds: Sequence[Round], contents: Contents, files: Files | None, device: torch.device) -> None:
        self._rounds, self._contents, self._files, self._device = rounds, contents, files, device
        self.reads, self.written = frozenset[int](), frozenset[int]()

    @property
    def count(self) -> int:
        """How many exchanges there are in all rounds."""
        return sum([each.exchanges.count for each in self._rounds])

    @property
    def staging(self) -> int:
        """The most bytes that buffers take at one time, those that are read into among them."""
        return max([self._room(each.parts()) + each.exchanges.staging for each in self._rounds], default=0)

    def _size(self, part: Part) -> int:
        return (part.last - part.first) * self._contents.entries[part.entry].itemsize

    def _room(self, parts: Iterable[Part]) -> int:
        return sum([aligned(self._size(part)) for part in parts])

    def run(
        self,
        sources: Locals,
        targets: Locals,
        sent: Callable[[], None] = lambda: None,
        keeps: bool = False,
        watch: Watch | None = None,
        state: object = None,
    ) -> None:
        """Read and move all rounds. Raises as `Exchanges.run`; what an earlier round wrote is torn, too. No view is
        kept, since the sources lie elsewhere in each run."""
        self.written = frozenset()
        for number, each in enumerate(self._rounds):
            text, written = f"round {number + 1} of {len(self._rounds)}", frozenset[int]()
            try:
                if watch is not None:
                    watch.enter(f"{text}, reading the checkpoint")
                with span(f"{text}, read"):
                    own = self._read(each)
                written = frozenset([each.places[place] for place in each.exchanges.schedule.writes])
                is_last = number + 1 == len(self._rounds)
                each.exchanges.run(own, [targets[n] for n in each.places], sent if is_last else _nothing, False, watch)
                del own  # its buffer is free before the next one is made
            except Exception as error:
                was_written, self.written = bool(self.written), self.written | written
                if was_written and not isinstance(error, Torn):
                    raise Torn(f"{text}: {error}") from error
                raise
            self.written |= {each.places[place] for place in each.exchanges.written}
        if not self._rounds:
            sent()

    def _read(self, each: Round) -> list[torch.Tensor | None]:
        """The round's sources of this rank, in a buffer that they share."""
        found: list[torch.Tensor | None] = [None] * len(each.places)
        parts = each.parts()
        if not parts or self._files is None:
            return found
        buffer = torch.empty(self._room(parts), dtype=torch.uint8, device="cpu")
        begins, at = dict[Part, int](), 0
        for part in parts:
            begins[part] = at
            at += aligned(self._size(part))
        memory = memoryview((ctypes.c_char * at).from_address(buffer.data_ptr())).cast("B")
        for file, some in self._stretches(parts):
            self._fill(file, [(part, memory[begins[part] : begins[part] + self._size(part)]) for part in some])
        del memory
        buffer = buffer.to(self._device)
        for place, (part, begin, shape) in each.locals.items():
            if part in begins:
                flat = buffer.narrow(0, begins[part], self._size(part))
                whole = flat.view(getattr(torch, self._contents.entries[part.entry].dtype))
                found[place] = whole.narrow(0, begin, math.prod(shape)).view(shape)
        return found

    def _begin(self, part: Part) -> int:
        """The byte of the file at which a part begins."""
        entry = self._contents.entries[part.entry]
        return entry.begin + part.first * entry.itemsize

    def _stretches(self, parts: Sequence[Part]) -> Iterator[tuple[int, list[Part]]]:
        """Parts that follow one another in a file, and its number."""
        some: list[Part] = []
        for part, after in zip(parts, [*parts[1:], None]):
            some.append(part)
            file = self._contents.entries[part.entry].file
            follows = after is not None and (file, self._begin(part) + self._size(part)) == (
                self._contents.entries[after.entry].file,
                self._begin(after),
            )
            if not follows or len(some) == VECTORS:
                yield file, some
                some = []

    def _fill(self, number: int, parts: Sequence[tuple[Part, memoryview]]) -> None:
        """Read parts that follow one another in a file into their places in memory, each of them aligned, however they
        lie in the file.

        Raises:
            RuntimeError: the file is shorter than it was, or was changed; names it, and the tensor.
        """
        if self._files is None:
            raise AssertionError("only readers read")
        file = self._files.files[number]
        part, at = parts[0][0], self._begin(parts[0][0])
        views = [view for _, view in parts]
        try:
            descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                file.check(os.fstat(descriptor))
                while views:
                    count = os.preadv(descriptor, views, at)
                    at += count
                    part = parts[-len(views)][0]
                    if not count:
                        raise RuntimeError(f"{file.path} ends at byte {at}")
                    while views and count >= len(views[0]):
                        count -= len(views.pop(0))
                    if count:
                        views[0] = views[0][count:]
                file.check(os.fstat(descriptor))  # written meanwhile
            finally:
                os.close(descriptor)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(f"reading {self._contents.entries[part.entry].name!r}: {error}") from error

    def forget(self) -> None:
        """Keep no view."""
        for each in self._rounds:
            each.exchanges.forget()


def _nothing() -> None:
    """What is called when an earlier round has read its sources: the program has none of them."""
