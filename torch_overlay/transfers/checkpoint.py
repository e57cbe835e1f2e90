"""A checkpoint of safetensors files as the source of a `Transfer`.

The ranks that give the checkpoint are its readers. All of them read the headers, and each gets a share of the bytes:
first rows that it wants itself. A share is cut into rounds. In a round, a reader fills a buffer, and sends what is in
it to the targets, as pieces of any other source, while a thread reads the next round into a second buffer. So each byte
is read once, and no reader has more of the checkpoint in memory than two rounds.

Start reading at `Contents.shares` for who reads what, and at `Rounds.run` for a run; the files are in `tensor_files`.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..distributed._mesh.text import of_ranks
from ..distributed._torch import span
from ..distributed.tensor._planner.boxes import Box
from ..rendezvous.long_waits import said_if_long
from ..show.words import counted
from ._planner.boxes import blocks
from ._planner.schedule import ALIGNED, aligned
from ._planner.sides import Ranks
from .exchanges import GOING, Going, InTurn, Torn, nothing
from .tensor_files import Entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from .blocks import Locals
    from .exchanges import Exchanges
    from .sharding import Sharding
    from .tensor_files import Files

VECTORS = 512  # buffers of one preadv; Linux takes 1,024
BUFFERS = 2  # that rounds are read into
# Bytes of a checkpoint that a rank reads in a round at most. Rounds take turns in two buffers: new memory is slow.
READ = 32 << 20
OWN = 256 << 10  # bytes from which on a reader reads rows since it wants them: reads that lie apart take longer
UNEVEN = 1.25  # times the mean that a reader reads at most
ROWS = 8  # if at least so many rows fit into a round, tensors are cut between rows


# --- Who reads what, as all ranks find it ---


class Stretch(NamedTuple):
    """Consecutive elements of a tensor, from `first` to before `last`. `entry` is the tensor's number."""

    entry: int
    first: int
    last: int


class Contents:
    """A checkpoint and its readers, as all ranks know them.

    Args:
        data: what `Files.as_data` returned.
        ranks: the readers, ascending.

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
        """Compare what the readers said of their files, and keep that of the first. None if there are no readers."""
        if not said:
            return None
        first, *others = sorted(said)
        for other in others:
            if said[other] is not said[first] and said[other] != said[first]:
                raise ValueError(
                    f"{of_ranks([first, other])} see different checkpoints: {_difference(said[first], said[other])}."
                )
        return Contents(said[first], [first, *others])

    def shares(self, targets: Mapping[str, Sharding | None], room: int) -> list[list[list[Stretch]]]:
        """Decide which parts each reader reads in each round.

        A reader reads rows that it wants itself, so that nobody sends them: all of them where FSDP shards the target by
        rows. Rows that several readers want are divided among them. All other parts fill up the readers with the fewest
        bytes, in the order of the files. Of the rows that it wants, no reader reads more than `UNEVEN` times the mean
        of all bytes.
        """
        by_entry: dict[int, Sharding | None] = {}
        for name, target in targets.items():
            by_entry.setdefault(self.numbers[name], target)
        total = sum([self.size(Stretch(number, 0, self.entries[number].elements)) for number in by_entry])
        readers = len(self.ranks)
        parts: list[list[Stretch]] = [[] for _ in self.ranks]
        loads, others, turn = [0] * readers, list[Stretch](), 0
        for number, target in sorted(by_entry.items(), key=lambda item: item[0]):
            entry = self.entries[number]
            if not entry.elements:
                parts[0].append(Stretch(number, 0, 0))  # there is nothing to read, but its name must have a source
                continue
            for first, last, places in _runs_wanted(entry.shape, target, self.ranks):
                run = Stretch(number, first, last)
                many = min(len(places), self.size(run) // OWN)
                if not many:
                    others.append(run)
                    continue
                cuts = [first, *[self._cut(run, self.size(run) * n // many, room) for n in range(1, many)], last]
                for n, (begin, end) in enumerate(itertools.pairwise(cuts)):
                    part, place = Stretch(number, begin, end), places[(turn + n) % len(places)]
                    if (loads[place] + self.size(part)) * readers > total * UNEVEN:
                        others.append(part)
                    elif begin < end:
                        parts[place].append(part)
                        loads[place] += self.size(part)
                turn += many
        self._fill_up(parts, loads, others, room)
        return [self._rounds(_joined(of_reader), room) for of_reader in parts]

    def _fill_up(self, parts: list[list[Stretch]], loads: Sequence[int], others: Sequence[Stretch], room: int) -> None:
        """Add the other parts to those of the readers, consecutive bytes to each, so that the loads get as even as they
        can."""
        size, count, below = sum(map(self.size, others)), 0, 0
        # The readers with the fewest bytes are filled up to one level, (size + below) / count, all in whole numbers.
        for load in sorted(loads):
            if load * count >= size + below:
                break
            count, below = count + 1, below + load
        quotas = [max(0, size + below - load * count) for load in loads]
        edges = [size * quota // max(1, sum(quotas)) for quota in itertools.accumulate([0, *quotas])]
        begin = place = 0
        for part in others:
            end = begin + self.size(part)
            while place + 1 < len(loads) and edges[place + 1] <= begin:
                place += 1
            reader = place
            while reader < len(loads) and edges[reader] < end:
                first, last = (self._cut(part, edge - begin, room) for edge in edges[reader : reader + 2])
                if first < last:
                    parts[reader].append(Stretch(part.entry, first, last))
                reader += 1
            begin = end

    def size(self, part: Stretch) -> int:
        """The bytes of a part in its file."""
        return (part.last - part.first) * self.entries[part.entry].itemsize

    def _cut(self, part: Stretch, at: int, room: int) -> int:
        """Return the element at which to cut a part, for a cut at its byte `at`."""
        if at <= 0:
            return part.first
        if at >= self.size(part):
            return part.last
        entry = self.entries[part.entry]
        return max(part.first, _whole_rows(entry, part.first + at // entry.itemsize, room))

    def _rounds(self, parts: Iterable[Stretch], room: int) -> list[list[Stretch]]:
        """Cut a reader's parts into rounds."""
        rounds, left = list[list[Stretch]]([[]]), room
        for number, first, last in parts:
            entry = self.entries[number]
            if first == last:  # an empty tensor
                rounds[-1].append(Stretch(number, first, last))
            while first < last:
                upto = min(last, first + left // entry.itemsize)
                if upto < last:
                    upto = _whole_rows(entry, upto, room)
                if upto <= first:  # not one row, or element, fits into this round any more
                    rounds.append([])
                    left = room
                    continue
                rounds[-1].append(Stretch(number, first, upto))
                left -= aligned((upto - first) * entry.itemsize)
                first = upto
        return rounds

    def boxes(self, part: Stretch) -> list[Box]:
        """Cut a part into boxes of its tensor, in the order of its bytes. An empty part is one box: its whole tensor,
        which is empty."""
        shape = self.entries[part.entry].shape
        whole = Box((0,) * len(shape), shape)
        return blocks(whole, part.first, part.last) if part.first < part.last else [whole]

    def read_boxes(self, shares: Iterable[Iterable[Iterable[Stretch]]]) -> dict[int, dict[int, list[Box]]]:
        """Return, by number of the entry and by the reader's rank, the boxes that the reader reads of it."""
        by_entry: dict[int, dict[int, list[Box]]] = {}
        for reader, rounds in zip(self.ranks, shares):
            for part in itertools.chain.from_iterable(rounds):
                by_entry.setdefault(part.entry, {}).setdefault(reader, []).extend(self.boxes(part))
        return by_entry


@lru_cache(maxsize=1024)
def _runs_wanted(
    shape: tuple[int, ...], target: Sharding | None, readers: tuple[int, ...]
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Cut a tensor into runs of consecutive elements by which readers want them. Cached: don't change the list."""
    wanted: dict[tuple[int, int], list[int]] = {}
    row, boxes = math.prod(shape[1:]), {} if target is None else boxes_by_rank(target)
    for place, rank in enumerate(readers):
        for box in boxes.get(rank, ()):
            if shape and box.length[1:] == shape[1:] and box.length[0]:
                first = box.start[0] * row
                wanted.setdefault((first, first + box.length[0] * row), []).append(place)
    runs, at = list[tuple[int, int, tuple[int, ...]]](), 0
    for (first, last), places in sorted(wanted.items()):
        if at < first:
            runs.append((at, first, ()))
        first, at = max(first, at), max(last, at)  # pieces of different readers may overlap
        if first < last:
            runs.append((first, last, tuple(places)))
    return [*runs, (at, math.prod(shape), ())] if at < math.prod(shape) else runs


@lru_cache(maxsize=256)
def boxes_by_rank(target: Sharding) -> dict[int, tuple[Box, ...]]:
    """Return the boxes that each rank wants of a tensor with this sharding. Cached: don't change the dict."""
    if target.pieces:
        return dict(zip(target.ranks, target.pieces))
    mesh = Ranks.of(target.ranks, target.regions.sizes)
    coordinates = {rank: mesh.coordinate(rank) for rank in target.ranks}
    return {rank: (target.regions.box(at),) for rank, at in coordinates.items() if at is not None}


def _joined(parts: Iterable[Stretch]) -> list[Stretch]:
    """Sort the parts of a reader, and join those that follow one another in a tensor."""
    joined: list[Stretch] = []
    for part in sorted(parts):
        if joined and joined[-1].entry == part.entry and joined[-1].last == part.first:
            joined[-1] = joined[-1]._replace(last=part.last)
        else:
            joined.append(part)
    return joined


def _whole_rows(entry: Entry, element: int, room: int) -> int:
    """Move a cut back to the beginning of its row of dim 0, if several rows fit into a round."""
    row = entry.elements // entry.shape[0] if entry.shape else 1
    return element // row * row if row * entry.itemsize * ROWS <= room else element


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Say in which tensor or file two different checkpoints differ first, in words."""
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


class ReadBox(NamedTuple):
    """A box of a part: what this rank reads for one piece.

    Attributes:
        begin: the position of the box's first element in the part.
        shape: the shape of the box.
    """

    part: Stretch
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
    locals: dict[int, ReadBox]
    exchanges: Exchanges

    def parts(self) -> list[Stretch]:
        """The parts that this rank reads, in the order of their bytes: those that go to some target."""
        return sorted({local.part for place, local in self.locals.items() if place in self.exchanges.reads})


def bytes_to_read_into(budget: int) -> int:
    """Return the bytes of a budget into which a round of a checkpoint is read, in one of two buffers. Buffers of
    exchanges take what is left."""
    return min(max(budget // 2 // BUFFERS, ALIGNED), READ)


class Rounds(InTurn):
    """The rounds of a plan. See `AnyExchanges`.

    Args:
        rounds: in order.
        contents: the checkpoint.
        files: the files that this rank reads; None if it reads nothing.
        device: where the tensors are to be when they are sent.

    Attributes:
        reads: empty, since no tensor of the program is read.
    """

    def __init__(self, rounds: Sequence[Round], contents: Contents, files: Files | None, device: torch.device) -> None:
        super().__init__([step.exchanges for step in rounds])
        self._rounds, self._contents, self._files, self._device = rounds, contents, files, device
        self._read_seconds = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """See `AnyExchanges`; of reading what the run waited for."""
        return {"read": self._read_seconds, **super().seconds}

    @property
    def staging(self) -> int:
        """See `AnyExchanges`; with the buffers that files are read into."""
        return min(len(self._rounds), BUFFERS) * self._most + super().staging

    @property
    def _most(self) -> int:
        """The most bytes that this rank reads in a round."""
        return max([self._room(step.parts()) for step in self._rounds], default=0)

    def _room(self, parts: Iterable[Stretch]) -> int:
        """Return the bytes of a buffer for these parts, each aligned."""
        return sum([aligned(self._contents.size(part)) for part in parts])

    def run(self, sources: Locals, targets: Locals, going: Going = GOING) -> None:
        """Read and move all rounds, one after the other, while a thread reads the next one. Collective.

        `sources` isn't used. No views are kept for the next run, since the sources lie in other buffers then.
        """
        if going.watch is None and self._rounds:  # which says so where there are several ranks
            with said_if_long(f"reading a checkpoint, in {counted(len(self._rounds), 'round')}"):
                self._run_rounds(targets, going)
        else:
            self._run_rounds(targets, going)

    def _run_rounds(self, targets: Locals, going: Going) -> None:
        """Do what `run` does. Collective."""
        watch = going.watch
        self.written, self._read_seconds = frozenset(), 0.0
        # Two buffers for all rounds: one is read into while the other is sent. Reading into memory that was written
        # before is seven times as fast as into new memory, which the system fills with zeros first.
        buffers = [torch.empty(self._most, dtype=torch.uint8, device="cpu") for _ in self._rounds[:BUFFERS]]
        with ThreadPoolExecutor(1, "torch_overlay reads a checkpoint") as reader:  # ends when nobody reads any more
            ahead = None
            for number, step in enumerate(self._rounds):
                text, written = f"{self.label}round {number + 1} of {len(self._rounds)}", frozenset[int]()
                buffer = buffers[number % BUFFERS]
                try:
                    if watch is not None:
                        watch.enter(f"{text}, reading the checkpoint")
                    begun = time.perf_counter()
                    with span(f"{text}, read"):
                        if ahead is None:
                            self._read(step, buffer)
                        else:
                            ahead.result()
                    self._read_seconds += time.perf_counter() - begun
                    own = self._sources(step, buffer)
                    ahead = self._read_ahead(reader, number + 1, buffers)
                    # What this round would write: if it fails, it may have written some of it.
                    written = frozenset([step.places[place] for place in step.exchanges.schedule.writes])
                    # Only after the last round are all sources sent.
                    done = going.sent if number + 1 == len(self._rounds) else nothing
                    now = going._replace(sent=done, keeps=False, state=None)
                    step.exchanges.run(own, [targets[n] for n in step.places], now)
                except Exception as error:
                    was_written, self.written = bool(self.written), self.written | written
                    if was_written and not isinstance(error, Torn):
                        raise Torn(f"{text}: {error}") from error
                    raise
                self.written |= {step.places[place] for place in step.exchanges.written}
        if not self._rounds:
            going.sent()

    def _read_ahead(
        self, reader: ThreadPoolExecutor, number: int, buffers: Sequence[torch.Tensor]
    ) -> Future[None] | None:
        """Begin to read a round on another thread, which launches nothing on a device. None if there is no such round,
        or if the interpreter ends and starts no threads any more: then the round is read when it is its turn."""
        if number == len(self._rounds):
            return None
        try:
            return reader.submit(self._read, self._rounds[number], buffers[number % BUFFERS])
        except RuntimeError:
            return None

    def _read(self, step: Round, buffer: torch.Tensor) -> None:
        """Read the parts of a round into a buffer of the host, each aligned. Raises as `_fill`."""
        parts = step.parts()
        if not parts or self._files is None:
            return
        begins = self._begins(parts)
        memory = memoryview((ctypes.c_char * len(buffer)).from_address(buffer.data_ptr())).cast("B")
        for file, stretch in self._stretches(parts):
            self._fill(
                file, [(part, memory[begins[part] : begins[part] + self._contents.size(part)]) for part in stretch]
            )

    def _begins(self, parts: Iterable[Stretch]) -> dict[Stretch, int]:
        """Return the byte of the buffer at which each part of a round begins."""
        begins, at = dict[Stretch, int](), 0
        for part in parts:
            begins[part] = at
            at += aligned(self._contents.size(part))
        return begins

    def _sources(self, step: Round, buffer: torch.Tensor) -> list[torch.Tensor | None]:
        """Return this rank's sources of a round for each place, as views of a buffer that was read; None where it has
        none. On another device than the CPU they are views of a copy there."""
        sources: list[torch.Tensor | None] = [None] * len(step.places)
        parts = step.parts()
        if not parts or self._files is None:
            return sources
        begins, buffer = self._begins(parts), buffer[: self._room(parts)].to(self._device)
        for place, (part, begin, shape) in step.locals.items():
            if part in begins:
                flat = buffer.narrow(0, begins[part], self._contents.size(part))
                whole = flat.view(getattr(torch, self._contents.entries[part.entry].dtype))
                sources[place] = whole.narrow(0, begin, math.prod(shape)).view(shape)
        return sources

    def _begin(self, part: Stretch) -> int:
        """The byte of the file at which a part begins."""
        entry = self._contents.entries[part.entry]
        return entry.begin + part.first * entry.itemsize

    def _stretches(self, parts: Sequence[Stretch]) -> Iterator[tuple[int, list[Stretch]]]:
        """Group parts that follow one another in a file, for one read of at most VECTORS parts. Yields the file's
        number and the parts."""
        stretch: list[Stretch] = []
        for part, after in zip(parts, [*parts[1:], None]):
            stretch.append(part)
            file = self._contents.entries[part.entry].file
            follows = after is not None and (file, self._begin(part) + self._contents.size(part)) == (
                self._contents.entries[after.entry].file,
                self._begin(after),
            )
            if not follows or len(stretch) == VECTORS:
                yield file, stretch
                stretch = []

    def _fill(self, number: int, parts: Sequence[tuple[Stretch, memoryview]]) -> None:
        """Read consecutive parts of a file into memory, each into its own aligned place."""
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
