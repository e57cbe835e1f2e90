"""Send only the elements whose bits have changed, as positions and values. Start at `ChangesOnly`.

A sender keeps the bytes of each message as it sent them last. In the next run it compares, and sends the elements that
differ, unless the whole message is shorter. Messages to several ranks that carry the same elements are kept and
compared once. Both ends know from the schedule which elements are in a message (`Form`), and tell each other only how
many of them changed. A large piece that goes directly from tensor to tensor (`P2PBatch`) is a message of its own: it is
compared where it lies, and nothing of it is packed unless a part of it changed.

A message of changes has the positions, of 2 or 4 bytes each, filled up to ALIGNED bytes; then the values in the same
order; filled up again. A position is the number of an element in the whole message.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ..distributed.tensor._runner.exchange import part
from ._planner.schedule import aligned, loads_of
from .blocks import BY_WIDTH, Block, Copies, locate_blocks, present
from .exchanges import Exchanges, InFlight, P2PBatch, ToPassOn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ..distributed.tensor._planner.boxes import Box
    from ._planner.schedule import Item, Load, Stream
    from .blocks import Locals, Wires
    from .exchanges import P2PMessage

    # By receiver, the tensor's label, its width and box: the first element, the one after the last, and their bytes.
    Kept = dict[tuple[int, object, int, Box], deque[tuple[int, int, torch.Tensor]]]

WORD = 8  # bytes that are compared at once
FEW = 8  # if at most one word in so many differs, the words that differ are picked out and looked at alone
WHOLE = -1  # stands in place of the number of changed elements for a message that is sent whole
SHORT = 1 << 16  # positions in a message of at most so many elements take 2 bytes, else 4
SAMPLED = 1024  # about so many elements of a message are looked at first
# A sample must show that changes would be so many times as long as the whole: its share is only near the true one.
SURE = 1.1


class Form(NamedTuple):
    """How the elements of a message lie in it: those of one width after those of another, the widest first, without
    gaps.

    Attributes:
        widths: of the elements, in bytes, descending.
        ends: for each width, the number of the element after its last one. Elements are numbered through the message.
    """

    widths: tuple[int, ...]
    ends: tuple[int, ...]

    @staticmethod
    def of(items: Iterable[Item]) -> Form:
        """Return the form of a message with these items, which are sorted by width."""
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
        """How many elements the message has."""
        return self.ends[-1] if self.ends else 0

    @property
    def size(self) -> int:
        """Bytes of the whole message, filled up to ALIGNED."""
        return aligned(sum([width * (end - begin) for width, begin, end in self.parts]))

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """For each width: the width, the number of its first element, and that of the element after its last one."""
        return [*zip(self.widths, (0, *self.ends), self.ends)]

    @property
    def position(self) -> int:
        """Bytes of a position in this message."""
        return 2 if self.elements <= SHORT else 4


def changed(now: torch.Tensor, before: torch.Tensor, form: Form) -> torch.Tensor | None:
    """Compare a message with what was sent last. Returns the numbers of the elements whose bits differ, ascending; None
    if so many differ that the whole message is shorter. On the CPU a sample may decide that."""
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
    """Return the positions of the flags that are true, ascending."""
    eights = flags[: len(flags) // 8 * 8].view(torch.int64)
    some = eights.nonzero().flatten()
    if len(flags) % 8 or len(some) * 4 > len(eights):
        return flags.nonzero().flatten()
    inside = flags.view(-1, 8).index_select(0, some).flatten().nonzero().flatten()
    return some.index_select(0, inside // 8) * 8 + inside % 8


def _with_begins(form: Form) -> Iterator[tuple[int, int, int, int]]:
    """Yield the parts of a form, each with the byte of the message at which it begins."""
    begin = 0
    for width, first, last in form.parts:
        yield width, first, last, begin
        begin += width * (last - first)


def _differing(
    bits: torch.Tensor, words: torch.Tensor | None, width: int, first: int, last: int, begin: int
) -> torch.Tensor:
    """Return the numbers of the elements of one width that differ."""
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
        inside, per_word = bits.view(BY_WIDTH[width]).bool().nonzero().flatten(), WORD // width
        if words is None:
            numbers = inside + at * per_word
        else:
            numbers = words.index_select(0, inside // per_word) * per_word + inside % per_word
    else:
        numbers = bits.nonzero().flatten() + at if words is None else words
        if width > WORD:
            numbers = torch.unique_consecutive(numbers // (width // WORD))
    numbers = numbers + (first - begin // width)  # not in place: it may be a view of `words`
    if begin % WORD or end % WORD:  # a word has elements of another width, or bytes that fill the message up
        numbers = numbers[(numbers >= first) & (numbers < last)]
    return numbers


def _many_differ(now: torch.Tensor, before: torch.Tensor, form: Form) -> bool:
    """Return True if so many elements of a message changed that it is shorter to send all of them, judged by a sample.

    A True saves the comparison of all elements, which takes as long as sending them within a machine. False means that
    they must be compared, also for a message that is too short for a sample.
    """
    width = form.widths[-1]
    new, old = (message.view(BY_WIDTH[width]) for message in (now, before))
    if len(new) < 2 * SAMPLED:
        return False
    # Odd, so that a matrix with 2**k columns isn't sampled in one column alone.
    step = len(new) // SAMPLED | 1
    share = int((new[::step] != old[::step]).count_nonzero()) / len(new[::step])
    return share * (width + form.position) > SURE * width


def is_longer(size: int, form: Form) -> bool:
    """True if a message of changes that has `size` bytes isn't shorter than the whole message."""
    return size >= form.size


def size_of(numbers: torch.Tensor, form: Form) -> int:
    """Return the bytes of the message that carries the changes of these elements."""
    values = [width * count for width, count in zip(form.widths, _counts(numbers, form))]
    return aligned(len(numbers) * form.position) + aligned(sum(values))


def _counts(numbers: torch.Tensor, form: Form) -> list[int]:
    """Return how many of these elements have each width. The numbers are ascending, so each width is an interval."""
    if len(form.ends) == 1:
        return [len(numbers)]
    ends = torch.searchsorted(numbers, torch.tensor(form.ends, device=numbers.device)).tolist()
    return [end - begin for begin, end in zip((0, *ends), ends)]


def pack(numbers: torch.Tensor, now: torch.Tensor, before: torch.Tensor, form: Form) -> torch.Tensor:
    """Make the message that carries the changes of these elements, and write them into `before`. The numbers ascend."""
    message = now.new_empty(size_of(numbers, form))
    # torch has little arithmetic for uint16. Positions from 2**15 on become negative here, and `land` masks them.
    kind = torch.int16 if form.position == 2 else torch.int32
    message[: len(numbers) * form.position].view(kind).copy_(numbers)
    at, begin, first = aligned(len(numbers) * form.position), 0, 0
    for (width, low, high), count in zip(form.parts, _counts(numbers, form)):
        bits, end = BY_WIDTH[width], begin + width * (high - low)
        of_width = numbers[first : first + count] - low
        values = now[begin:end].view(bits)[of_width]
        message[at : at + width * count].view(bits).copy_(values)
        before[begin:end].view(bits)[of_width] = values
        at, begin, first = at + width * count, end, first + count
    return message


class Spot(NamedTuple):
    """Where the elements of a message from number `first` on lie on the receiver: a block of a target."""

    first: int
    block: Block


def land(
    message: torch.Tensor,
    count: int,
    form: Form,
    spots: Sequence[Spot],
    targets: Sequence[torch.Tensor | None],
    wires: Sequence[torch.dtype | None],
) -> None:
    """Write a message of changes into the targets."""
    if not count:
        return
    kind = torch.int16 if form.position == 2 else torch.int32
    numbers = message[: count * form.position].view(kind).to(torch.int64)
    if form.position == 2:
        numbers &= SHORT - 1
    values, at, first = [], aligned(count * form.position), 0
    for width, width_count in zip(form.widths, _counts(numbers, form)):
        values.append((first, message[at : at + width_count * width].view(BY_WIDTH[width])))
        at, first = at + width_count * width, first + width_count
    starts = [spot.first for spot in spots]
    bounds = torch.searchsorted(numbers, torch.tensor(starts, device=numbers.device)).tolist() + [count]
    begins = [first for first, _ in values]
    for spot, low, high in zip(spots, bounds, bounds[1:]):
        if low == high:
            continue
        # Widths of which no element changed begin where the next one does; bisect takes the last of these.
        first, its = values[bisect_right(begins, low) - 1]
        target, wire = present(targets[spot.block.tensor]), wires[spot.block.tensor]
        new = its[low - first : high - first]
        _flat(target, spot.block)[_offsets(numbers[low:high] - spot.first, spot.block)] = (
            new if wire is None else new.view(wire).to(target.dtype)
        )


def _flat(target: torch.Tensor, block: Block) -> torch.Tensor:
    """Return the target's memory from the first element of a block to its last one, as a flat view."""
    extent = 1 + sum([(size - 1) * stride for size, stride in zip(block.size, block.stride)])
    return target.as_strided((extent,), (1,), block.offset)


def _offsets(numbers: torch.Tensor, block: Block) -> torch.Tensor:
    """Map the numbers of elements of a block, counted row-major, to their offsets in its memory."""
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
    """What a sender keeps of a message, and of all other messages that carry the same elements.

    Args:
        form: of the message.
        is_on_cpu: whether the bytes are kept in the host's memory (`changes="cpu"`).

    Attributes:
        bytes: of the message as it was sent last; None if it was never sent.
    """

    def __init__(self, form: Form, is_on_cpu: bool) -> None:
        self.form, self._is_on_cpu = form, is_on_cpu
        self.bytes: torch.Tensor | None = None

    def whole(self, now: torch.Tensor) -> None:
        """Keep the bytes of a message that is sent whole."""
        if self.bytes is None:
            device = "cpu" if self._is_on_cpu else now.device
            self.bytes = torch.empty(len(now), dtype=torch.uint8, device=device)
        self.bytes.copy_(now)

    def changes(self, now: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """Compare a message with what was sent last, and keep what changed."""
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


class Outgoing(NamedTuple):
    """A message that this rank sends in one exchange.

    Attributes:
        place: the position of the receiver in the group.
        at: the byte at which the message begins in the packed buffer; 0 for a large piece.
        form: of the message.
        items: what it carries.
        sent: what was sent last, with which it is compared.
        p2p: the point-to-point message, if it is a large piece; else None.
    """

    place: int
    at: int
    form: Form
    items: tuple[Item, ...]
    sent: Sent
    p2p: P2PMessage | None = None


class Incoming(NamedTuple):
    """A message that this rank receives in one exchange.

    Attributes:
        place: the position of the sender in the group.
        form: of the message.
        copies: where it is written if it comes whole.
        spots: where its elements are written if changes come.
        p2p: the point-to-point message, if it is a large piece; else None. If it comes whole, `P2PBatch` writes it.
    """

    place: int
    form: Form
    copies: Copies
    spots: list[Spot]
    p2p: P2PMessage | None = None


class Header(NamedTuple):
    """What a sender tells the receiver of a message before it.

    Attributes:
        elements: how many elements changed, or WHOLE.
        size: the bytes of the message in the all-to-all; 0 for a large piece that goes whole, beside it.
    """

    elements: int
    size: int


class ChangesOnly(Exchanges):
    """Exchanges that send only the elements which changed since the last run. Arguments are those of `Exchanges`.

    In each exchange a rank compares its messages, tells each receiver by a `Header` how much comes, and then sends. A
    receiver that doesn't have what was sent last gets the message whole.

    Args:
        is_on_cpu: whether what was sent is kept in the host's memory.

    Attributes:
        passes_on: if given, decides on all ranks alike, by the bytes that the first exchange sends each rank and gets
            from it, whether to raise ToPassOn. What is kept is then as if all had been sent, and nobody has it yet.
    """

    def __init__(self, *given: Any, is_on_cpu: bool = False) -> None:
        super().__init__(*given)
        self._is_on_cpu = is_on_cpu
        self.passes_on: Callable[[Sequence[int], Sequence[int]], bool] | None = None
        # For each exchange the messages, ordered by the other rank; for each rank the packed one before the
        # point-to-point ones.
        self._outgoing: list[list[Outgoing]] = []
        self._incoming: list[list[Incoming]] = []
        self._known: dict[tuple[int, object], Sent] = {}
        self._have: set[tuple[int, Sent]] = set()  # the positions of ranks that have what was sent last, each with it
        self._before: tuple[Kept, Sequence[object]] = {}, ()  # what `take` got, and the label of each tensor
        # What other ranks said of the messages in `_incoming`: for the exchange that began last, and for the one that
        # is unpacked. One more exchange begins before the last one is unpacked.
        self._headers: list[Header] = []
        self._landing_headers: list[Header] = []

    @property
    def staging(self) -> int:
        """The most bytes that buffers take: as of `Exchanges`, and half of it again for messages of changes, which are
        made beside the packed messages and are shorter."""
        return super().staging * 3 // 2

    def send_whole_next(self, ranks: Iterable[int] | None = None) -> None:
        """In the next run, send whole messages to these ranks, not only what changed since the last run."""
        kept, labels = self._before
        if ranks is None:
            self._have, self._before = set(), ({}, ())
            for sent in self._known.values():
                sent.bytes = None
        else:
            some = {*ranks}
            self._have = {(place, sent) for place, sent in self._have if self.team.ranks[place] not in some}
            self._before = {key: bytes_ for key, bytes_ in kept.items() if key[0] not in some}, labels

    def give(self, labels: Sequence[object]) -> Kept:
        """Let go of what was sent, and return it for exchanges that are made in place of these. Each tensor has a label
        that means the same for both."""
        kept, self._before = self._before[0], ({}, ())
        for message in itertools.chain(*self._outgoing):
            if message.sent.bytes is None or (message.place, message.sent) not in self._have:
                continue
            at = 0
            for key, first, last, size in self._parts(message.place, message.items, labels):
                kept.setdefault(key, deque()).append((first, last, message.sent.bytes[at : at + size]))
                at += size
        self.send_whole_next()
        return kept

    def take(self, kept: Kept, labels: Sequence[object]) -> None:
        """Begin with what others sent, by `give`: ranks that got all of a message from this rank have it."""
        self._before = kept, labels

    def _parts(
        self, place: int, items: Iterable[Item], labels: Sequence[object]
    ) -> Iterator[tuple[tuple[int, object, int, Box], int, int, int]]:
        """Yield the parts of a message: the key in `Kept`, the first element, that after the last, and the bytes."""
        for item in items:
            for tensor in item.tensors:
                key = self.team.ranks[place], labels[tensor], item.itemsize, item.box
                yield key, item.first, item.last, item.step

    def _taken(self, place: int, items: Iterable[Item]) -> list[torch.Tensor] | None:
        """Take out what this rank sent of a message before; None if it didn't send all of it. Messages come in the
        order of a stream, so that what was cut in another way is freed as soon as all of it was taken."""
        kept, labels = self._before
        parts: list[torch.Tensor] = []
        for key, at, end, _ in self._parts(place, items, labels) if kept else ():
            pieces = kept.get(key, deque())
            while at < end and pieces and pieces[0][0] <= at:
                first, last, bytes_ = pieces[0]
                upto, width = max(at, min(last, end)), key[2]
                parts.append(bytes_[(at - first) * width : (upto - first) * width])
                at = upto
                if last <= at:
                    pieces.popleft()
            if at < end:
                return None
        return parts or None

    def _exchange(self, sources: Locals, targets: Locals, sent: Callable[[], None]) -> None:
        """Run all exchanges, and set `sent_bytes` and `changed`. Only then do all receivers have what was sent: if one
        fails, they get everything whole in the next run. See `Exchanges.run` for the arguments and errors."""
        self.sent_bytes, self.received_bytes, self.changed = 0, 0, (0, 0)
        try:
            super()._exchange(sources, targets, sent)
        except ToPassOn:
            self._have = set()
            for number in range(1, self.count):
                packed = self._pack(number, sources)
                self._compared(number, packed, sources)
                self._buffers.give(packed)
            raise
        self.all_have()

    def all_have(self) -> None:
        """Note that all receivers have what is kept as sent last."""
        self._have = {(message.place, message.sent) for message in itertools.chain(*self._outgoing)}

    def _find_blocks(self, sources: Locals, targets: Locals, wires: Wires) -> None:
        """Compute the messages of each exchange, and store them, unless the tensors lie as in the last run."""
        before = self._geometry
        super()._find_blocks(sources, targets, wires)
        if self._geometry == before:
            return
        self._outgoing, self._incoming = [], []
        for number, (out, into) in enumerate(self._directions):
            outgoing, at = list[Outgoing](), 0
            for place, items in self._packed_messages(number, self.schedule.sends):
                outgoing.append(self._outgoing_of(number, place, at, items))
                at += outgoing[-1].form.size
            for p2p in out.p2p_messages:
                outgoing.append(self._outgoing_of(number, p2p.place, 0, (p2p.item,), p2p))
            self._outgoing.append(sorted(outgoing, key=_message_order))
            incoming = [
                Incoming(place, Form.of(items), *_written(items, targets, wires))
                for place, items in self._packed_messages(number, self.schedule.receives)
            ]
            for p2p in into.p2p_messages:
                items = (p2p.item,)
                incoming.append(Incoming(p2p.place, Form.of(items), *_written(items, targets, wires), p2p))
            self._incoming.append(sorted(incoming, key=_message_order))
        self._before = {}, ()

    def _outgoing_of(
        self, number: int, place: int, at: int, items: tuple[Item, ...], p2p: P2PMessage | None = None
    ) -> Outgoing:
        """Make a message of exchange `number`. Messages of equal items carry the same elements, and share what was
        sent last of them."""
        form = Form.of(items)
        sent = self._known.setdefault((number, items), Sent(form, self._is_on_cpu))
        parts = self._taken(place, items)
        if parts is not None:
            if sent.bytes is None:
                sent.whole(torch.cat([*parts, parts[0].new_zeros(form.size - sum(map(len, parts)))]))
            self._have.add((place, sent))
        return Outgoing(place, at, form, items, sent, p2p)

    def _packed_messages(self, number: int, streams: Mapping[int, Stream]) -> Iterator[tuple[int, tuple[Item, ...]]]:
        """Yield the packed messages of exchange `number`: the position of the other rank, and the message's items."""
        for peer, stream in streams.items():
            items = tuple(
                [item for item in stream.cut(number, self.count) if self._large is None or not self._large.takes(item)]
            )
            if items:
                yield self._place[peer], items

    def _start(self, number: int, packed: torch.Tensor, sources: Locals, targets: Locals) -> InFlight:
        """Begin exchange `number`: compare, tell the receivers how much comes, and send. Waits for the headers of other
        ranks, not for the messages."""
        outgoing, incoming = self._outgoing[number], self._incoming[number]
        with self._step(number, "compare"):
            out, own = self._compared(number, packed, sources)
        with self._step(number, "say what changed", waits=True):
            self._headers = self._exchange_headers(number, own)
        splits, into = self._splits(outgoing, own), self._splits(incoming, self._headers)
        if number == 0 and self.passes_on is not None:
            with self._step(number, "choose the way", waits=True):
                whole = [self._whole_bytes(outgoing, own), self._whole_bytes(incoming, self._headers)]
                is_passed = self.passes_on(*[[*map(sum, zip(*both))] for both in zip((splits, into), whole)])
            if is_passed:
                self._buffers.give(packed)
                raise ToPassOn
        if any(header.elements != WHOLE for header in own):
            shorter = self._buffers.take(sum(splits))
            if any(map(len, out)):
                torch.cat(out, out=shorter)
            self._buffers.give(packed)  # of which whole messages are views
            packed = shorter
        p2p_messages = [
            [p2p for p2p in direction.p2p_messages if id(p2p) in whole]
            for direction, whole in zip(
                self._directions[number], (_whole(outgoing, own), _whole(incoming, self._headers))
            )
        ]
        self.sent_bytes += sum(splits) + sum([p2p.size for p2p in p2p_messages[0]])
        self.received_bytes += sum(into) + sum([p2p.size for p2p in p2p_messages[1]])
        came = self._buffers.take(sum(into))
        with self._step(number, "send", waits=True):
            batch = P2PBatch(*p2p_messages)
            self._is_written |= batch.writes
            finish = batch.start(self.team, self._buffers, sources, targets)
            work = self._swap(came, packed, into, splits)
        return InFlight(work, packed, came, finish)

    def _splits(self, messages: Iterable[Outgoing | Incoming], headers: Sequence[Header]) -> list[int]:
        """Return, for each rank of the group, the bytes of the messages to it, or from it."""
        splits = [0] * len(self._place)
        for message, (_, size) in zip(messages, headers):
            splits[message.place] += size
        return splits

    def _whole_bytes(self, messages: Iterable[Outgoing | Incoming], headers: Sequence[Header]) -> list[int]:
        """Return, for each rank of the group, the bytes of the point-to-point messages that go whole."""
        sizes = [0] * len(self._place)
        for message, (elements, _) in zip(messages, headers):
            if message.p2p is not None and elements == WHOLE:
                sizes[message.place] += message.p2p.size
        return sizes

    def _compared(self, number: int, packed: torch.Tensor, sources: Locals) -> tuple[list[torch.Tensor], list[Header]]:
        """Compare the messages of exchange `number` with what was sent last, where a receiver has that."""
        out: list[torch.Tensor] = []
        headers: list[Header] = []
        compared: dict[int, tuple[int, torch.Tensor] | None] = {}  # by id of what was sent, the changes
        elements, total = self.changed
        outgoing = self._outgoing[number]
        # A message is compared if some receiver has what was sent last, and so can take changes.
        asked = {id(message.sent) for message in outgoing if (message.place, message.sent) in self._have}
        for message in outgoing:
            sent, p2p = message.sent, message.p2p
            now = packed[message.at : message.at + message.form.size] if p2p is None else packed[:0]
            if id(sent) not in compared:
                bytes_ = now if p2p is None else _bytes_of(p2p, message.form, sources, packed.device)
                compared[id(sent)] = sent.changes(bytes_) if id(sent) in asked else None
                if compared[id(sent)] is None:
                    sent.whole(bytes_)
            changes = compared[id(sent)]
            if changes is None or (message.place, message.sent) not in self._have:
                count = WHOLE
                elements += message.form.elements
            else:
                count, now = changes
                elements += count
            out.append(now)
            headers.append(Header(count, len(now)))
            total += message.form.elements
        self.changed = elements, total
        return out, headers

    def _exchange_headers(self, number: int, own: Sequence[Header]) -> list[Header]:
        """Tell each receiver what comes in exchange `number`, and hear what comes to this rank. Collective."""
        incoming = self._incoming[number]
        if self.team.is_fake:
            return [Header(WHOLE, message.form.size) for message in incoming]
        into, out = (
            [len(Header._fields) * count for count in self._splits(messages, [Header(0, 1)] * len(messages))]
            for messages in (incoming, self._outgoing[number])
        )
        given = torch.tensor([*itertools.chain(*own)], dtype=torch.int64, device=self.team.device)
        came = given.new_empty(sum(into))
        exchange = self.team.call(dist.all_to_all_single)
        self._wait(exchange(came, given, into, out, group=self.team.group, async_op=True))
        if self.team.device.type != "cpu":  # else reading the numbers would wait for them, and no abort may end that
            self.team.wait_for_event(torch.accelerator.current_stream(self.team.device).record_event())
        return [Header(*row) for row in came.view(-1, len(Header._fields)).tolist()]

    def _await_exchange(self, number: int, running: InFlight | None, sent: Callable[[], None]) -> torch.Tensor:
        """Wait for exchange `number`, as `Exchanges` does, and keep its headers for `_land`."""
        self._landing_headers = (
            self._headers
        )  # the next exchange begins, and overwrites it, before this one is unpacked
        came = super()._await_exchange(number, running, sent)
        # On a GPU only the stream waits so far. `land` reads numbers of what came, in a step that counts as work. Where
        # the only rank that sends had died, all others waited there for ever, and the clock saw nobody wait.
        self._wait_for_device()
        return came

    def _land(self, number: int, came: torch.Tensor, targets: Locals) -> None:
        """Unpack what exchange `number` received: whole messages as `Exchanges` does, changes element by element."""
        messages, headers = self._incoming[number], self._landing_headers
        if all(header.elements == WHOLE for header in headers):
            super()._land(number, came, targets)
            return
        wires = self._wires or [None] * len(targets)
        at = 0
        with self._step(number, "unpack"):
            for message, header in zip(messages, headers):
                bytes_ = came[at : at + header.size]
                if header.elements != WHOLE:
                    land(bytes_, header.elements, message.form, message.spots, targets, wires)
                elif message.p2p is None:
                    message.copies.land(targets, bytes_)
                at += header.size


def _whole(messages: Iterable[Outgoing | Incoming], headers: Sequence[Header]) -> set[int]:
    """Return the ids of the point-to-point messages that go whole."""
    return {id(message.p2p) for message, (elements, _) in zip(messages, headers) if elements == WHOLE}


def _message_order(message: Outgoing | Incoming) -> tuple[int, int]:
    """Return the key by which both ends sort the messages of an exchange."""
    return message.place, -1 if message.p2p is None else message.p2p.tag


def _bytes_of(p2p: P2PMessage, form: Form, sources: Locals, device: torch.device) -> torch.Tensor:
    """Return the bytes of a large piece, filled up to ALIGNED: a view of the source if it can be read as words of 8
    bytes, else a copy on `device`."""
    if p2p.flat is not None:
        flat = p2p.flat.of(sources).view(torch.uint8)
        if len(flat) == form.size and flat.storage_offset() % WORD == 0:
            return flat
    copied = torch.empty(form.size, dtype=torch.uint8, device=device)
    if p2p.flat is not None:
        copied[: p2p.size] = flat
    elif p2p.copies is not None:
        p2p.copies.pack(sources, copied[: p2p.size])
    return copied


def _written(items: Iterable[Item], targets: Locals, wires: Wires) -> tuple[Copies, list[Spot]]:
    """Return where a message with these items is written: as a whole, and element by element."""
    loads: list[Load] = []
    spots: list[Spot] = []
    at = first = 0
    for item in items:
        for load in loads_of(item, at):
            loads.append(load)
            for tensor in load.tensors:
                spots.append(Spot(first, Block.at(tensor, part(present(targets[tensor]), load.box))))
                first += load.box.elements
        at += item.step * len(item.tensors)
    return Copies(locate_blocks(loads, targets, wires)), spots
