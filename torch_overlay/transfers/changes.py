"""Only what changed: messages of a transfer as the positions and the values of elements whose bits differ.

A sender keeps the bytes of each message as they were sent last. In the next run it compares, and sends the elements
that differ, unless the whole message is shorter. Messages to several ranks that carry the same elements are kept and
compared once. Sender and receiver know what is in a message from the schedule: `Form` is that, and the two ends never
describe it to one another.

A message of changes is laid out as: positions, of 2 or 4 bytes each, filled up to ALIGNED bytes; then the values, in
the same order; filled up again. A position is the number of an element in the whole message.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ..distributed.tensor._runner.exchange import part
from ._planner.schedule import aligned, loads_of
from .exchanges import BY_WIDTH, Block, Copies, Exchanges, InFlight, runs_of, there

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ._planner.schedule import Item, Load, Stream
    from .exchanges import Locals, Wires

WORD = 8  # bytes that are compared at once
FEW = 32  # words, of which at most one differs where it is worth to look for elements in words
WHOLE = -1  # in place of how many elements of a message changed
SHORT = 1 << 16  # elements of a message whose positions take 2 bytes


class Form(NamedTuple):
    """What a message carries: elements of one width after those of another, the widest first, without gaps.

    Attributes:
        widths: in bytes.
        ends: for each width, how many elements of the message come before the next width.
    """

    widths: tuple[int, ...]
    ends: tuple[int, ...]

    @staticmethod
    def of(items: Iterable[Item]) -> Form:
        """The form of a message with these items."""
        widths: list[int] = []
        ends: list[int] = []
        for item in items:
            if not widths or widths[-1] != item.itemsize:
                widths.append(item.itemsize)
                ends.append(ends[-1] if ends else 0)
            ends[-1] += (item.last - item.first) * len(item.tensors)
        return Form(tuple(widths), tuple(ends))

    @property
    def elements(self) -> int:
        """Of all widths."""
        return self.ends[-1] if self.ends else 0

    @property
    def size(self) -> int:
        """Bytes of the whole message, with what fills it up."""
        return aligned(sum([width * (end - begin) for width, begin, end in self.parts]))

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """Each width with its first element and the one after its last."""
        return [*zip(self.widths, (0, *self.ends), self.ends)]

    @property
    def position(self) -> int:
        """Bytes of a position."""
        return 2 if self.elements <= SHORT else 4


def changed(now: torch.Tensor, before: torch.Tensor, form: Form) -> torch.Tensor | None:
    """The numbers of the elements whose bits differ, ascending; None if the whole message is shorter.

    Args:
        now, before: the bytes of the message, ``form.size`` of them. Those that fill it up may be anything.
    """
    differ = now.view(torch.int64) != before.view(torch.int64)
    count = int(differ.count_nonzero())
    if is_longer(count * (form.widths[-1] + form.position), form):
        return None
    # Where few words differ, only those are looked at by element.
    words = differ.nonzero().flatten() if count * FEW < len(differ) else None
    found, begin = [], 0
    for width, first, last in form.parts:
        end = begin + width * (last - first)
        if words is None:
            new, old = (each[begin:end].view(BY_WIDTH[min(width, WORD)]) for each in (now, before))
            numbers = (new != old).nonzero().flatten()
            numbers = numbers if width <= WORD else torch.unique_consecutive(numbers // (width // WORD))
        else:
            some = words[torch.searchsorted(words, begin // WORD) : torch.searchsorted(words, -(-end // WORD))]
            numbers = _in_words(some, now, before, begin, end, width)
        found.append(numbers + first)
        begin = end
    numbers = torch.cat(found)
    return None if is_longer(size_of(numbers, form), form) else numbers


def _in_words(
    words: torch.Tensor, now: torch.Tensor, before: torch.Tensor, begin: int, end: int, width: int
) -> torch.Tensor:
    """Which elements of this width differ, of those that lie in these words, from one byte of the message to another;
    by their number after the first byte."""
    if width > WORD:
        return torch.unique_consecutive((words * WORD - begin) // width)
    inside = torch.arange(0, WORD, width, device=words.device)
    numbers = ((words[:, None] * WORD + inside).flatten() - begin) // width
    numbers = numbers[(numbers >= 0) & (numbers < (end - begin) // width)]
    new, old = (each[begin:end].view(BY_WIDTH[width])[numbers] for each in (now, before))
    return numbers[new != old]


def is_longer(size: int, form: Form) -> bool:
    """Whether a message of changes of so many bytes is no shorter than the whole message."""
    return size >= form.size


def size_of(numbers: torch.Tensor, form: Form) -> int:
    """The bytes of a message of changes of these elements."""
    values = [width * count for width, count in zip(form.widths, _counts(numbers, form))]
    return aligned(len(numbers) * form.position) + aligned(sum(values))


def _counts(numbers: torch.Tensor, form: Form) -> list[int]:
    """How many of these elements have each width."""
    if len(form.ends) == 1:
        return [len(numbers)]
    ends = torch.searchsorted(numbers, torch.tensor(form.ends, device=numbers.device)).tolist()
    return [end - begin for begin, end in zip((0, *ends), ends)]


def pack(numbers: torch.Tensor, now: torch.Tensor, before: torch.Tensor, form: Form) -> torch.Tensor:
    """The message of changes of these elements. `before` becomes `now`."""
    made = now.new_empty(size_of(numbers, form))
    kind = torch.int16 if form.position == 2 else torch.int32
    made[: len(numbers) * form.position].view(kind).copy_(numbers)  # of 16 bits the upper half are negative
    at, begin, first = aligned(len(numbers) * form.position), 0, 0
    for (width, low, high), count in zip(form.parts, _counts(numbers, form)):
        bits, end = BY_WIDTH[width], begin + width * (high - low)
        some = numbers[first : first + count] - low
        values = now[begin:end].view(bits)[some]
        made[at : at + width * count].view(bits).copy_(values)
        before[begin:end].view(bits)[some] = values
        at, begin, first = at + width * count, end, first + count
    return made


class Place(NamedTuple):
    """Where some elements of a message lie on the receiver; `first` is the number of the first one in the message."""

    first: int
    block: Block


def land(
    message: torch.Tensor,
    count: int,
    form: Form,
    places: Sequence[Place],
    targets: Sequence[torch.Tensor | None],
    wires: Sequence[torch.dtype | None],
) -> None:
    """Write a message of changes into the targets.

    Args:
        message: its bytes, which hold so many elements.
        places: in the order of the message.
        targets: as whole numbers, unless they change their type.
        wires: the type in which a tensor travels that changes its type.
    """
    if not count:
        return
    kind = torch.int16 if form.position == 2 else torch.int32
    numbers = message[: count * form.position].view(kind).to(torch.int64)
    if form.position == 2:
        numbers &= SHORT - 1
    values, at, first = [], aligned(count * form.position), 0
    for width, some in zip(form.widths, _counts(numbers, form)):
        values.append((first, message[at : at + some * width].view(BY_WIDTH[width])))
        at, first = at + some * width, first + some
    starts = [place.first for place in places]
    bounds = torch.searchsorted(numbers, torch.tensor(starts, device=numbers.device)).tolist() + [count]
    begins = [first for first, _ in values]
    for place, low, high in zip(places, bounds, bounds[1:]):
        if low == high:
            continue
        # Of several widths without an element the last one begins where the others do.
        first, its = values[bisect_right(begins, low) - 1]
        target, wire = there(targets[place.block.tensor]), wires[place.block.tensor]
        new = its[low - first : high - first]
        _flat(target, place.block)[_offsets(numbers[low:high] - place.first, place.block)] = (
            new if wire is None else new.view(wire).to(target.dtype)
        )


def _flat(target: torch.Tensor, block: Block) -> torch.Tensor:
    """The target's memory from the first element of a block to its last."""
    extent = 1 + sum([(size - 1) * stride for size, stride in zip(block.size, block.stride)])
    return target.as_strided((extent,), (1,), block.offset)


def _offsets(numbers: torch.Tensor, block: Block) -> torch.Tensor:
    """Where elements of a block lie in its memory, from their numbers in row-major order."""
    dense, offsets = 1, None
    for size, stride in zip(reversed(block.size), reversed(block.stride)):
        if stride != dense and size > 1:
            break
        dense *= size
    else:
        return numbers
    inner = 1
    for size, stride in zip(reversed(block.size), reversed(block.stride)):
        part = (numbers // inner) % size * stride
        offsets = part if offsets is None else offsets + part
        inner *= size
    return numbers if offsets is None else offsets


class Sent:
    """What a sender keeps of one message, and of each other one that carries the same.

    Attributes:
        bytes: as they were sent last; None before.
    """

    def __init__(self, form: Form, is_on_cpu: bool) -> None:
        self.form, self._is_on_cpu = form, is_on_cpu
        self.bytes: torch.Tensor | None = None

    def whole(self, now: torch.Tensor) -> None:
        """It is sent whole."""
        if self.bytes is None:
            device = "cpu" if self._is_on_cpu else now.device
            self.bytes = torch.empty(len(now), dtype=torch.uint8, device=device)
        self.bytes.copy_(now)

    def changes(self, now: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """How many elements changed since it was sent last, and the message that says so; None if it was never sent,
        or is shorter whole."""
        if self.bytes is None:
            return None
        before = self.bytes.to(now.device)
        numbers = changed(now, before, self.form)
        if numbers is None:
            return None
        packed = pack(numbers, now, before, self.form)
        if before is not self.bytes:
            self.bytes.copy_(before)
        return len(numbers), packed


class Going(NamedTuple):
    """What goes to the rank at a place of the group, in one exchange.

    Attributes:
        at: where it begins in the packed bytes of all messages.
        sent: to what it is compared.
    """

    place: int
    at: int
    form: Form
    sent: Sent


class Coming(NamedTuple):
    """What comes from the rank at a place of the group, in one exchange.

    Attributes:
        copies, places: where it is written: whole, and by element.
    """

    place: int
    form: Form
    copies: Copies
    places: list[Place]


class ChangesOnly(Exchanges):
    """Exchanges of what changed since the last run.

    Attributes:
        sent_bytes: what this rank sent to others in the last run, positions included.
        changed: how many elements it sent in the last run, and of how many.
    """

    packs_all = True

    def __init__(self, *given: Any, is_on_cpu: bool = False) -> None:
        super().__init__(*given)
        self._is_on_cpu = is_on_cpu
        self._goes: list[list[Going]] = []  # by exchange
        self._comes: list[list[Coming]] = []
        self._known: dict[tuple[int, tuple[Item, ...]], Sent] = {}
        self._have: set[int] = set()  # places of the ranks that have what was sent last
        # What other ranks said of the exchange that began last, and of the one that lands: how many elements of a
        # message changed, or WHOLE, and its bytes.
        self._counts: list[list[int]] = []
        self._landing: list[list[int]] = []
        self.sent_bytes, self.changed = 0, (0, 0)

    @property
    def staging(self) -> int:
        """See `Exchanges`; and messages of changes beside what they are made of, which are shorter."""
        return super().staging * 3 // 2

    def lose(self, ranks: Iterable[int] | None = None) -> None:
        """Send everything to these ranks as a whole the next time; to all, and keep nothing, if None."""
        if ranks is None:
            self._have = set()
            for sent in self._known.values():
                sent.bytes = None
        else:
            self._have -= {self._place[rank] for rank in ranks}

    def forget(self) -> None:
        """Keep no view, and nothing of what was sent."""
        super().forget()
        self.lose()

    def _exchange(self, sources: Locals, targets: Locals, sent: Callable[[], None]) -> None:
        self.sent_bytes, self.changed = 0, (0, 0)
        super()._exchange(sources, targets, sent)
        self._have = {*self._place.values()}

    def _find_blocks(self, sources: Locals, targets: Locals, wires: Wires) -> None:
        before = self._geometry
        super()._find_blocks(sources, targets, wires)
        if self._geometry == before:
            return
        self._goes, self._comes = [], []
        for number in range(self.count):
            goes, at = list[Going](), 0
            for place, items in self._messages_of(number, self.schedule.sends):
                form = Form.of(items)
                sent = self._known.setdefault((number, items), Sent(form, self._is_on_cpu))
                goes.append(Going(place, at, form, sent))
                at += form.size
            self._goes.append(goes)
            comes = self._messages_of(number, self.schedule.receives)
            self._comes.append(
                [Coming(place, Form.of(items), *_written(items, targets, wires)) for place, items in comes]
            )

    def _messages_of(self, number: int, streams: Mapping[int, Stream]) -> Iterator[tuple[int, tuple[Item, ...]]]:
        """By place of the other rank, what is in its message."""
        for peer, stream in streams.items():
            items = tuple(stream.cut(number, self.count))
            if items:
                yield self._place[peer], items

    def _start(self, number: int, packed: torch.Tensor, sources: Locals, targets: Locals) -> InFlight:
        with self._step(number, "compare"):
            out, counts = self._compared(number, packed)
        with self._step(number, "say how much changed", waits=True):
            self._counts = self._say(number, counts)
        splits, into = ([length for _, length in each] for each in (counts, self._counts))
        self.sent_bytes += sum(splits)
        if any(count != WHOLE for count, _ in counts):
            shorter = self._buffers.take(sum(splits))
            if out:
                torch.cat([out[place] for place in sorted(out)], out=shorter)
            self._buffers.give(packed)  # of which whole messages are views
            packed = shorter
        came = self._buffers.take(sum(into))
        with self._step(number, "send", waits=True):
            work = self._swap(came, packed, into, splits)
        return InFlight(work, packed, came, lambda: None)

    def _compared(self, number: int, packed: torch.Tensor) -> tuple[dict[int, torch.Tensor], list[list[int]]]:
        """The bytes for each place; and of each how many elements changed, WHOLE if all are sent, and the length."""
        out: dict[int, torch.Tensor] = {}
        counts = [[WHOLE, 0] for _ in self._place]
        made: dict[int, tuple[int, torch.Tensor] | None] = {}
        elements, of = self.changed
        for message in self._goes[number]:
            now, sent = packed[message.at : message.at + message.form.size], message.sent
            if id(sent) not in made:
                # Who has what was sent last gets changes; if nobody has it, it isn't compared.
                some = any(other.sent is sent and other.place in self._have for other in self._goes[number])
                made[id(sent)] = sent.changes(now) if some else None
                if made[id(sent)] is None:
                    sent.whole(now)
            found = made[id(sent)]
            if found is None or message.place not in self._have:
                count, bytes_ = WHOLE, now
                elements += message.form.elements
            else:
                count, bytes_ = found
                elements += count
            out[message.place], counts[message.place] = bytes_, [count, len(bytes_)]
            of += message.form.elements
        self.changed = elements, of
        return out, counts

    def _say(self, number: int, counts: list[list[int]]) -> list[list[int]]:
        """What the other ranks say of their messages to this one, by place."""
        if self.team.is_fake:
            sizes = {message.place: message.form.size for message in self._comes[number]}
            return [[WHOLE, sizes.get(place, 0)] for place in range(len(counts))]
        given = torch.tensor(counts, device=self.team.device)
        came = torch.empty_like(given)
        self.team.call(dist.all_to_all_single)(came, given, group=self.team.group)
        return came.tolist()  # type: ignore[no-any-return]

    def _came(self, number: int, running: InFlight | None, sent: Callable[[], None]) -> torch.Tensor:
        self._landing = self._counts  # those of the next exchange are said before this one lands
        return super()._came(number, running, sent)

    def _land(self, number: int, came: torch.Tensor, targets: Locals) -> None:
        messages, counts = self._comes[number], self._landing
        if all(counts[message.place][0] == WHOLE for message in messages):
            super()._land(number, came, targets)
            return
        wires = self._wires or [None] * len(targets)
        at = 0
        with self._step(number, "unpack"):
            for message in messages:
                count, length = counts[message.place]
                its = came[at : at + length]
                if count == WHOLE:
                    message.copies.land(targets, its)
                else:
                    land(its, count, message.form, message.places, targets, wires)
                at += length


def _written(items: Iterable[Item], targets: Locals, wires: Wires) -> tuple[Copies, list[Place]]:
    """Where a message is written that has these items."""
    loads: list[Load] = []
    places: list[Place] = []
    at = first = 0
    for item in items:
        for load in loads_of(item, at):
            loads.append(load)
            for tensor in load.tensors:
                places.append(Place(first, Block.at(tensor, part(there(targets[tensor]), load.box))))
                first += load.box.elements
        at += item.step * len(item.tensors)
    return Copies(runs_of(loads, targets, wires)), places
