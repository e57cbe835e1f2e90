"""Only what changed: messages of a transfer as the positions and the values of elements whose bits differ.

A sender keeps the bytes of each message as they were sent last. In the next run it compares, and sends the elements
that differ, unless the whole message is shorter. Messages to several ranks that carry the same elements are kept and
compared once. Sender and receiver know what is in a message from the schedule: `Form` is that, and the two ends never
describe it to one another. A large piece that goes directly from tensor to tensor (`Mail`) is a message of its own: it
is compared where it lies, and nothing of it is packed unless it changed in part.

A message of changes is laid out as: positions, of 2 or 4 bytes each, filled up to ALIGNED bytes; then the values, in
the same order; filled up again. A position is the number of an element in the whole message.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ..distributed.tensor._runner.exchange import part
from ._planner.schedule import aligned, loads_of
from .blocks import BY_WIDTH, Block, Copies, present, runs_of
from .exchanges import Exchanges, InFlight, Mail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ._planner.schedule import Item, Load, Stream
    from .blocks import Locals, Wires
    from .exchanges import Letter

WORD = 8  # bytes that are compared at once
FEW = 8  # words, of which at most one differs where it is worth to look at those that do alone
WHOLE = -1  # in place of how many elements of a message changed
SHORT = 1 << 16  # elements of a message whose positions take 2 bytes
SAMPLED = 1024  # elements of a message that are looked at first
SURE = 1.1  # times the length at which a message of changes is no shorter: a sample's share is that near


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
    if now.is_cpu and _many_differ(now, before, form):
        return None
    new, old = now.view(torch.int64), before.view(torch.int64)
    differ = new != old
    count = int(differ.count_nonzero())
    if is_longer(count * (form.widths[-1] + form.position), form):
        return None
    words = None
    if count * FEW <= len(differ):
        words = _true(differ)
        bits = new.index_select(0, words) ^ old.index_select(0, words)
    else:
        bits = new ^ old
    numbers = torch.cat([_differing(bits, words, *part) for part in _with_begins(form)])
    return None if is_longer(size_of(numbers, form), form) else numbers


def _true(flags: torch.Tensor) -> torch.Tensor:
    """The numbers of the flags that are true, ascending. `nonzero` takes some time for each flag, so eight of them are
    looked at together first where few are true."""
    eights = flags[: len(flags) // 8 * 8].view(torch.int64)
    some = eights.nonzero().flatten()
    if len(flags) % 8 or len(some) * 4 > len(eights):
        return flags.nonzero().flatten()
    inside = flags.view(-1, 8).index_select(0, some).flatten().nonzero().flatten()
    return some.index_select(0, inside // 8) * 8 + inside % 8


def _with_begins(form: Form) -> Iterator[tuple[int, int, int, int]]:
    """The parts of a form, each before the byte at which it begins."""
    begin = 0
    for width, first, last in form.parts:
        yield width, first, last, begin
        begin += width * (last - first)


def _differing(
    bits: torch.Tensor, words: torch.Tensor | None, width: int, first: int, last: int, begin: int
) -> torch.Tensor:
    """The elements of one width that differ, by their numbers in the message.

    Args:
        bits: those that differ of each word, as whole numbers; of all words of the message if `words` is None.
        words: the numbers of these words in the message, ascending.
        first, last: the elements of this width.
        begin: the byte of the message at which they begin. It is a multiple of the width, but perhaps not of a word.
    """
    end = begin + width * (last - first)
    low, high = begin // WORD, -(-end // WORD)
    at = low
    if words is None:
        bits = bits[low:high]
    else:
        low, high = torch.searchsorted(words, torch.tensor([low, high], device=words.device)).tolist()
        words, bits, at = words[low:high], bits[low:high], 0
    if width < WORD:
        # As bools first: `nonzero` is fastest for these.
        inside, each = bits.view(BY_WIDTH[width]).bool().nonzero().flatten(), WORD // width
        if words is None:
            numbers = inside + at * each
        else:
            numbers = words.index_select(0, inside // each) * each + inside % each
    else:
        numbers = bits.nonzero().flatten() + at if words is None else words
        if width > WORD:
            numbers = torch.unique_consecutive(numbers // (width // WORD))
    numbers += first - begin // width
    if begin % WORD or end % WORD:  # a word has elements of another width, or bytes that fill the message up
        numbers = numbers[(numbers >= first) & (numbers < last)]
    return numbers


def _many_differ(now: torch.Tensor, before: torch.Tensor, form: Form) -> bool:
    """Whether so many of some elements differ that the whole message is shorter.

    Comparing all of them takes as long as sending does within a machine. If the sample is wrong, the message is longer
    than it need be, and right.
    """
    width = form.widths[-1]
    new, old = (each.view(BY_WIDTH[width]) for each in (now, before))
    if len(new) < 2 * SAMPLED:
        return False
    step = len(new) // SAMPLED | 1  # odd, so that it doesn't meet one column of a matrix alone
    share = int((new[::step] != old[::step]).count_nonzero()) / len(new[::step])
    return share * (width + form.position) > SURE * width


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
        target, wire = present(targets[place.block.tensor]), wires[place.block.tensor]
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
        at: where it begins in the packed bytes of all messages; of a letter 0.
        sent: to what it is compared.
        letter: a large piece, if it is one.
    """

    place: int
    at: int
    form: Form
    sent: Sent
    letter: Letter | None = None


class Coming(NamedTuple):
    """What comes from the rank at a place of the group, in one exchange.

    Attributes:
        copies, places: where it is written: whole, and by element.
        letter: a large piece, if it is one; whole it is written by `Mail`.
    """

    place: int
    form: Form
    copies: Copies
    places: list[Place]
    letter: Letter | None = None


class Said(NamedTuple):
    """What a sender says of a message.

    Attributes:
        elements: how many changed, or WHOLE.
        size: its bytes in the all-to-all; 0 of a letter that goes whole.
    """

    elements: int
    size: int


class ChangesOnly(Exchanges):
    """Exchanges of what changed since the last run.

    Attributes:
        sent_bytes: what this rank sent to others in the last run, positions included.
        changed: how many elements it sent in the last run, and of how many.
    """

    def __init__(self, *given: Any, is_on_cpu: bool = False) -> None:
        super().__init__(*given)
        self._is_on_cpu = is_on_cpu
        # By exchange, in the order of the other ranks; for each of them what is packed, then the letters by their tags.
        self._goes: list[list[Going]] = []
        self._comes: list[list[Coming]] = []
        self._known: dict[tuple[int, object], Sent] = {}
        self._have: set[int] = set()  # places of the ranks that have what was sent last
        # What other ranks said of their messages, as in `_comes`: of the exchange that began last, and of the one that
        # lands.
        self._said: list[Said] = []
        self._landing: list[Said] = []
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
        for number, (out, into) in enumerate(self._ways):
            goes, at = list[Going](), 0
            for place, items in self._packed_messages(number, self.schedule.sends):
                form = Form.of(items)
                goes.append(Going(place, at, form, self._sent_of(number, items, form)))
                at += form.size
            for letter in out.letters:
                form = Form.of((letter.item,))
                goes.append(Going(letter.place, 0, form, self._sent_of(number, letter.item, form), letter))
            self._goes.append(sorted(goes, key=_in_message))
            comes = [
                Coming(place, Form.of(items), *_written(items, targets, wires))
                for place, items in self._packed_messages(number, self.schedule.receives)
            ]
            for letter in into.letters:
                items = (letter.item,)
                comes.append(Coming(letter.place, Form.of(items), *_written(items, targets, wires), letter))
            self._comes.append(sorted(comes, key=_in_message))

    def _sent_of(self, number: int, key: object, form: Form) -> Sent:
        return self._known.setdefault((number, key), Sent(form, self._is_on_cpu))

    def _packed_messages(self, number: int, streams: Mapping[int, Stream]) -> Iterator[tuple[int, tuple[Item, ...]]]:
        """By place of the other rank, what is packed into its message."""
        for peer, stream in streams.items():
            every = stream.cut(number, self.count)
            items = tuple([item for item in every if self._large is None or not self._large.takes(item)])
            if items:
                yield self._place[peer], items

    def _start(self, number: int, packed: torch.Tensor, sources: Locals, targets: Locals) -> InFlight:
        goes, comes = self._goes[number], self._comes[number]
        with self._step(number, "compare"):
            out, own = self._compared(number, packed, sources)
        with self._step(number, "say how much changed", waits=True):
            self._said = self._say(number, own)
        splits, into = self._splits(goes, own), self._splits(comes, self._said)
        if any(said.elements != WHOLE for said in own):
            shorter = self._buffers.take(sum(splits))
            if any(map(len, out)):
                torch.cat(out, out=shorter)
            self._buffers.give(packed)  # of which whole messages are views
            packed = shorter
        letters = [
            [letter for letter in way.letters if id(letter) in whole]
            for way, whole in zip(self._ways[number], (_whole(goes, own), _whole(comes, self._said)))
        ]
        self.sent_bytes += sum(splits) + sum([letter.size for letter in letters[0]])
        came = self._buffers.take(sum(into))
        with self._step(number, "send", waits=True):
            mail = Mail(*letters)
            self._is_written |= mail.writes
            finish = mail.start(self.team, self._buffers, sources, targets)
            work = self._swap(came, packed, into, splits)
        return InFlight(work, packed, came, finish)

    def _splits(self, messages: Iterable[Going | Coming], said: Sequence[Said]) -> list[int]:
        splits = [0] * len(self._place)
        for message, each in zip(messages, said):
            splits[message.place] += each.size
        return splits

    def _compared(self, number: int, packed: torch.Tensor, sources: Locals) -> tuple[list[torch.Tensor], list[Said]]:
        """The bytes of each message, of a letter that goes whole none; and what is said of each."""
        out: list[torch.Tensor] = []
        every: list[Said] = []
        made: dict[int, tuple[int, torch.Tensor] | None] = {}
        elements, of = self.changed
        goes = self._goes[number]
        # Who has what was sent last gets changes; if nobody has it, it isn't compared.
        asked = {id(message.sent) for message in goes if message.place in self._have}
        for message in goes:
            sent, letter = message.sent, message.letter
            now = packed[message.at : message.at + message.form.size] if letter is None else packed[:0]
            if id(sent) not in made:
                bytes_ = now if letter is None else _bytes_of(letter, message.form, sources, packed.device)
                made[id(sent)] = sent.changes(bytes_) if id(sent) in asked else None
                if made[id(sent)] is None:
                    sent.whole(bytes_)
            found = made[id(sent)]
            if found is None or message.place not in self._have:
                count = WHOLE
                elements += message.form.elements
            else:
                count, now = found
                elements += count
            out.append(now)
            every.append(Said(count, len(now)))
            of += message.form.elements
        self.changed = elements, of
        return out, every

    def _say(self, number: int, own: Sequence[Said]) -> list[Said]:
        """What the other ranks say of their messages to this one."""
        comes = self._comes[number]
        if self.team.is_fake:
            return [Said(WHOLE, message.form.size) for message in comes]
        into, out = (
            [len(Said._fields) * many for many in self._splits(messages, [Said(0, 1)] * len(messages))]
            for messages in (comes, self._goes[number])
        )
        given = torch.tensor([*itertools.chain(*own)], dtype=torch.int64, device=self.team.device)
        came = given.new_empty(sum(into))
        self.team.call(dist.all_to_all_single)(came, given, into, out, group=self.team.group)
        return [Said(*each) for each in came.view(-1, len(Said._fields)).tolist()]

    def _came(self, number: int, running: InFlight | None, sent: Callable[[], None]) -> torch.Tensor:
        self._landing = self._said  # those of the next exchange are said before this one lands
        return super()._came(number, running, sent)

    def _land(self, number: int, came: torch.Tensor, targets: Locals) -> None:
        messages, every = self._comes[number], self._landing
        if all(said.elements == WHOLE for said in every):
            super()._land(number, came, targets)
            return
        wires = self._wires or [None] * len(targets)
        at = 0
        with self._step(number, "unpack"):
            for message, said in zip(messages, every):
                its = came[at : at + said.size]
                if said.elements != WHOLE:
                    land(its, said.elements, message.form, message.places, targets, wires)
                elif message.letter is None:
                    message.copies.land(targets, its)
                at += said.size


def _whole(messages: Iterable[Going | Coming], said: Sequence[Said]) -> set[int]:
    """The ids of the letters that go whole."""
    return {id(message.letter) for message, each in zip(messages, said) if each.elements == WHOLE}


def _in_message(message: Going | Coming) -> tuple[int, int]:
    return message.place, -1 if message.letter is None else message.letter.tag


def _bytes_of(letter: Letter, form: Form, sources: Locals, device: torch.device) -> torch.Tensor:
    """The bytes of a large piece, with what fills them up: where they lie, if words can be read there."""
    if letter.flat is not None:
        flat = letter.flat.of(sources).view(torch.uint8)
        if len(flat) == form.size and flat.storage_offset() % WORD == 0:
            return flat
    found = torch.empty(form.size, dtype=torch.uint8, device=device)
    if letter.flat is not None:
        found[: letter.size] = flat
    elif letter.copies is not None:
        letter.copies.pack(sources, found[: letter.size])
    return found


def _written(items: Iterable[Item], targets: Locals, wires: Wires) -> tuple[Copies, list[Place]]:
    """Where a message is written that has these items."""
    loads: list[Load] = []
    places: list[Place] = []
    at = first = 0
    for item in items:
        for load in loads_of(item, at):
            loads.append(load)
            for tensor in load.tensors:
                places.append(Place(first, Block.at(tensor, part(present(targets[tensor]), load.box))))
                first += load.box.elements
        at += item.step * len(item.tensors)
    return Copies(runs_of(loads, targets, wires)), places
