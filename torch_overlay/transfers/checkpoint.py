"""A checkpoint of safetensors files as the source of a `Transfer`.

The ranks that give the checkpoint are its readers. All of them read the headers, and each gets an equal share of the
bytes, in the order of the files. A share is cut into rounds. In a round, a reader fills a buffer of half of the budget,
and sends what is in it to the targets, as pieces of any other source. So each byte is read once, and no reader has more
of the checkpoint in memory than one round.

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

    from .blocks import Locals
    from .exchanges import Exchanges
    from .tensor_files import Files
    from .watch import Watch

VECTORS = 512  # buffers of one preadv; Linux takes 1,024
ROWS = 8  # if at least so many rows fit into a round, tensors are cut between rows


# --- Who reads what, as all ranks find it ---


class Part(NamedTuple):
    """Consecutive elements of a tensor, from `first` to before `last`. `entry` is the tensor's number."""

    entry: int
    first: int
    last: int


class Contents:
    """A checkpoint and its readers, as all ranks know them.

    Attributes:
        ranks: the readers, ascending.
        entries: the tensors, in the order of their bytes.
        numbers: for each name of the target, the number of the tensor that goes there.
    """

    def __init__(self, data: Mapping[str, Any], ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        rows = data["tensors"]
        self.entries = [Entry(name, dtype, tuple(shape), *where) for name, dtype, shape, *where, _ in rows]
        self.numbers = {name: number for number, (*_, names) in enumerate(rows) for name in names}

    @staticmethod
    def of(said: Mapping[int, Any]) -> Contents | None:
        """Compare what the readers said, and keep that of the first. None if there are no readers.

        Args:
            said: for each reader's rank, its `Files.as_data`.

        Raises:
            ValueError: readers see different files, or map names differently; names the file, and the tensor.
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
        """Which parts each reader reads in each round, for the tensors with these names in the target.

        Readers get equal numbers of consecutive bytes, in the order of the files. A round takes as many of them as fit
        into `room` bytes, each part aligned.

        Returns:
            A list by the reader's place in `ranks`, of lists by round.
        """
        numbers = sorted({self.numbers[name] for name in names})
        sizes = [self.entries[number].elements * self.entries[number].itemsize for number in numbers]
        readers = len(self.ranks)
        edges = [sum(sizes) * place // readers for place in range(readers + 1)]
        parts: list[list[Part]] = [[] for _ in self.ranks]
        begin = place = 0
        for number, size in zip(numbers, sizes):
            if not size:
                parts[0].append(Part(number, 0, 0))  # there is nothing to read, but its name must have a source
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
        return [self._rounds(of_reader, room) for of_reader in parts]

    def _cut(self, number: int, at: int, size: int, room: int) -> int:
        """Return the element at which to cut a tensor, for a cut at its byte `at`.

        Args:
            number: of the entry.
            size: the bytes of the tensor.
            room: the bytes of a round. If several rows fit into it, the cut is moved back to the begin of a row.
        """
        entry = self.entries[number]
        if at <= 0:
            return 0
        return entry.elements if at >= size else _whole_rows(entry, at // entry.itemsize, room)

    def _rounds(self, parts: Iterable[Part], room: int) -> list[list[Part]]:
        """Cut a reader's parts into rounds of at most `room` bytes, each part aligned. There is at least one round."""
        rounds, left = list[list[Part]]([[]]), room
        for number, first, last in parts:
            entry = self.entries[number]
            if first == last:  # an empty tensor
                rounds[-1].append(Part(number, first, last))
            while first < last:
                upto = min(last, first + left // entry.itemsize)
                if upto < last:
                    upto = _whole_rows(entry, upto, room)
                if upto <= first:  # not one row, or element, fits into this round any more
                    rounds.append([])
                    left = room
                    continue
                rounds[-1].append(Part(number, first, upto))
                left -= aligned((upto - first) * entry.itemsize)
                first = upto
        return rounds

    def boxes(self, part: Part) -> list[Box]:
        """Cut a part into boxes of its tensor, in the order of its bytes."""
        shape = self.entries[part.entry].shape
        whole = Box((0,) * len(shape), shape)
        return blocks(whole, part.first, part.last) if part.first < part.last else [whole]

    def read_boxes(self, shares: Iterable[Iterable[Iterable[Part]]]) -> dict[int, dict[int, list[Box]]]:
        """By number of the entry and by reader, the boxes that the reader reads of it, given the shares of all."""
        by_entry: dict[int, dict[int, list[Box]]] = {}
        for reader, rounds in zip(self.ranks, shares):
            for part in itertools.chain.from_iterable(rounds):
                by_entry.setdefault(part.entry, {}).setdefault(reader, []).extend(self.boxes(part))
        return by_entry


def _whole_rows(entry: Entry, element: int, room: int) -> int:
    """Move a cut back to the begin of its row of dim 0, if several rows fit into a round. Then the parts are fewer
    boxes: a part of a matrix that begins and ends inside of rows is three."""
    row = entry.elements // entry.shape[0] if entry.shape else 1
    return element // row * row if row * entry.itemsize * ROWS <= room else element


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Say in which tensor or file two checkpoints differ first."""
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
    """Compare rows by the name with which they begin. Yields each name whose rows differ, with the rest of both rows;
    None in place of a row that one side lacks."""
    one, other = ({name: rest for name, *rest in some} for some in (rows, others))
    for name in sorted({*one, *other}):
        if one.get(name) != other.get(name):
            yield name, one.get(name), other.get(name)


# --- A run ---


class Local(NamedTuple):
    """A box of a part: what this rank reads for one piece.

    Attributes:
        begin: the position of the box's first element in the part.
        shape: the shape of the box.
    """

    part: Part
    begin: int
    shape: tuple[int, ...]


class Round(NamedTuple):
    """One round of a plan.

    Attributes:
        places: the places in the plan of the tensors that it moves.
        locals: for each index of `places`, the box that this rank reads, if it reads one.
        exchanges: how the tensors are moved.
    """

    places: list[int]
    locals: dict[int, Local]
    exchanges: Exchanges

    def parts(self) -> list[Part]:
        """The parts that this rank reads, in the order of their bytes: those that go to some target."""
        return sorted({local.part for place, local in self.locals.items() if place in self.exchanges.reads})


class Rounds:
    """The rounds of a plan. A run uses it in place of one `Exchanges`, and it has the same interface.

    Args:
        files: the files that this rank reads; None if it reads nothing.

    Attributes:
        reads: empty, since no tensor of the program is read.
        written: the places in the plan whose targets have been written, as of `Exchanges`.
    """

    def __init__(self, rounds: Sequence[Round], contents: Contents, files: Files | None, device: torch.device) -> None:
        self._rounds, self._contents, self._files, self._device = rounds, contents, files, device
        self.reads, self.written = frozenset[int](), frozenset[int]()

    @property
    def count(self) -> int:
        """How many exchanges there are in all rounds."""
        return sum([step.exchanges.count for step in self._rounds])

    @property
    def staging(self) -> int:
        """The most bytes that buffers take at one time, including those that files are read into."""
        return max([self._room(step.parts()) + step.exchanges.staging for step in self._rounds], default=0)

    def _size(self, part: Part) -> int:
        """Return the bytes of a part."""
        return (part.last - part.first) * self._contents.entries[part.entry].itemsize

    def _room(self, parts: Iterable[Part]) -> int:
        """Return the bytes of a buffer for these parts, each aligned."""
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
        """Read and move all rounds, one after the other. Raises as `Exchanges.run`.

        If a round fails after an earlier one has written targets, the error is `Torn`: the targets are a mixture. No
        views are kept for the next run, since the sources lie in other buffers then.
        """
        self.written = frozenset()
        for number, step in enumerate(self._rounds):
            text, written = f"round {number + 1} of {len(self._rounds)}", frozenset[int]()
            try:
                if watch is not None:
                    watch.enter(f"{text}, reading the checkpoint")
                with span(f"{text}, read"):
                    own = self._read(step)
                # What this round would write: if it fails, it may have written some of it.
                written = frozenset([step.places[place] for place in step.exchanges.schedule.writes])
                is_last = number + 1 == len(self._rounds)
                step.exchanges.run(own, [targets[n] for n in step.places], sent if is_last else _nothing, False, watch)
                del own  # its buffer is free before the next one is made
            except Exception as error:
                was_written, self.written = bool(self.written), self.written | written
                if was_written and not isinstance(error, Torn):
                    raise Torn(f"{text}: {error}") from error
                raise
            self.written |= {step.places[place] for place in step.exchanges.written}
        if not self._rounds:
            sent()

    def _read(self, step: Round) -> list[torch.Tensor | None]:
        """Read this rank's sources of a round into one buffer. Returns a view of it for each place, or None."""
        sources: list[torch.Tensor | None] = [None] * len(step.places)
        parts = step.parts()
        if not parts or self._files is None:
            return sources
        buffer = torch.empty(self._room(parts), dtype=torch.uint8, device="cpu")
        begins, at = dict[Part, int](), 0
        for part in parts:
            begins[part] = at
            at += aligned(self._size(part))
        memory = memoryview((ctypes.c_char * at).from_address(buffer.data_ptr())).cast("B")
        for file, stretch in self._stretches(parts):
            self._fill(file, [(part, memory[begins[part] : begins[part] + self._size(part)]) for part in stretch])
        del memory  # it isn't valid any more when the buffer is freed
        buffer = buffer.to(self._device)
        for place, (part, begin, shape) in step.locals.items():
            if part in begins:
                flat = buffer.narrow(0, begins[part], self._size(part))
                whole = flat.view(getattr(torch, self._contents.entries[part.entry].dtype))
                sources[place] = whole.narrow(0, begin, math.prod(shape)).view(shape)
        return sources

    def _begin(self, part: Part) -> int:
        """The byte of the file at which a part begins."""
        entry = self._contents.entries[part.entry]
        return entry.begin + part.first * entry.itemsize

    def _stretches(self, parts: Sequence[Part]) -> Iterator[tuple[int, list[Part]]]:
        """Group parts that follow one another in a file, for one read. Yields the file's number and the parts."""
        stretch: list[Part] = []
        for part, after in zip(parts, [*parts[1:], None]):
            stretch.append(part)
            file = self._contents.entries[part.entry].file
            follows = after is not None and (file, self._begin(part) + self._size(part)) == (
                self._contents.entries[after.entry].file,
                self._begin(after),
            )
            if not follows or len(stretch) == VECTORS:
                yield file, stretch
                stretch = []

    def _fill(self, number: int, parts: Sequence[tuple[Part, memoryview]]) -> None:
        """Read consecutive parts of a file into memory, each into its own aligned place.

        Raises:
            RuntimeError: the file is shorter than it was, or has changed; names the file, and the tensor.
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
                while views:  # a read may return less than was asked for, as at 2 GiB
                    count = os.preadv(descriptor, views, at)
                    at += count
                    part = parts[-len(views)][0]
                    if not count:
                        raise RuntimeError(f"{file.path} ends at byte {at}")
                    while views and count >= len(views[0]):
                        count -= len(views.pop(0))
                    if count:
                        views[0] = views[0][count:]
                file.check(os.fstat(descriptor))  # again: somebody may have written it while we read
            finally:
                os.close(descriptor)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(f"reading {self._contents.entries[part.entry].name!r}: {error}") from error

    def forget(self) -> None:
        """Let go of kept views."""
        for step in self._rounds:
            step.exchanges.forget()


def _nothing() -> None:
    """The callback `sent` of all rounds but the last: only after that one are all sources sent."""
