"""`Schedule`: what one rank packs, sends, receives and unpacks in each exchange of a transfer.

All bytes from one rank to another form a stream, the widest elements first, so that each element in a message lies
aligned to its own width. Each exchange carries the same share of every stream: exchange k of n carries the bytes from
k/n to (k+1)/n. So sender and receiver know what is in a message without asking, and ranks only have to agree on n. A
tensor that doesn't fit into one share is cut. Large pieces can travel by themselves, from tensor to tensor, without
being packed: see `Large`.

Two exchanges are in memory at a time: one is packed while another runs, and one is unpacked while the next runs. So a
rank that sends S bytes and gets R holds at most (S + R + max(S, R)) / n of them, and `least` gives the n with which
this stays within a budget. Start at `Schedule.of`. Standard library only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ...distributed.tensor._planner.boxes import Box
from .boxes import blocks
from .routes import Move, shares_of_replicas

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from .piece_moves import PieceMove

    AnyMove = Move | PieceMove


ALIGNED = 16  # each message begins at a multiple of so many bytes: the width of a complex128
# Bytes by which a message may exceed its share of a stream: it ends with a whole element, and is filled up to ALIGNED.
ROUNDED = 2 * ALIGNED
KEPT = 1 << 15  # a schedule of more pieces isn't remembered


def aligned(size: int) -> int:
    """Round a number of bytes up to where the next message can begin.

    >>> aligned(1), aligned(16)
    (16, 16)
    """
    return size + -size % ALIGNED


class Load(NamedTuple):
    """A block of each of some local tensors, and where these blocks lie in the buffer of an exchange.

    The blocks have one box and follow one another in the buffer at equal distances, so that one strided view shows all
    of them. A block may be cut into equal parts that lie in the messages of several ranks: the columns of a row
    shard do, if each rank gets some of them.

    Attributes:
        tensors: the indices of the moves whose tensors these are.
        box: where the block lies in each local tensor.
        at: the byte of the buffer at which the first tensor's block, or the first part of it, begins.
        step: the distance from one tensor's block to the next one's, in bytes.
        parts: into how many parts the block is cut.
        dim: the dim along which it is cut.
        apart: the distance from one part to the next, in bytes.
    """

    tensors: tuple[int, ...]
    box: Box
    at: int
    step: int
    parts: int = 1
    dim: int = 0
    apart: int = 0

    def then(self, part: Load) -> Load | None:
        """Return this load extended by the next part of the same blocks. None if that gives no load."""
        (start, length), apart = self.box, part.at - self.at - (self.parts - 1) * self.apart
        dims = [dim for dim, (own, other) in enumerate(zip(start, part.box.start)) if own != other]
        if len(dims) != 1 or self.step != part.step or (self.parts > 1 and (*dims, apart) != (self.dim, self.apart)):
            return None
        (dim,) = dims
        inner = (*length[:dim], length[dim] // self.parts, *length[dim + 1 :])
        if part.box.length != inner or part.box.start[dim] != start[dim] + length[dim]:
            return None
        longer = (*length[:dim], length[dim] + inner[dim], *length[dim + 1 :])
        return self._replace(box=Box(start, longer), parts=self.parts + 1, dim=dim, apart=apart)


class Large(NamedTuple):
    """Which pieces travel by themselves, from tensor to tensor, without being packed with others.

    Attributes:
        least: a piece of so many bytes, or more, is large.
        most: a message has at most so many bytes; a large piece is cut into several messages.
    """

    least: int
    most: int

    def takes(self, item: Item) -> bool:
        """True if each tensor's part of this item travels by itself."""
        return item.step >= self.least


class Direct(NamedTuple):
    """A message by which a large piece, or a part of one, travels by itself.

    Attributes:
        peer: the other rank.
        tag: its number among such messages between the two ranks in one exchange.
        item: what it carries, of one tensor.
    """

    peer: int
    tag: int
    item: Item

    @property
    def size(self) -> int:
        """In bytes."""
        return self.item.step


class Messages(NamedTuple):
    """All that one rank sends in an exchange, or all that it receives.

    Attributes:
        sizes: for each peer the bytes of its packed message. Messages follow one another in the buffer in this order.
        loads: what is in the packed messages.
        direct: the messages of large pieces.
    """

    sizes: dict[int, int]
    loads: list[Load]
    direct: list[Direct]

    @property
    def size(self) -> int:
        """All bytes of both kinds, with those that fill packed messages up to ALIGNED."""
        return sum(self.sizes.values()) + sum([message.size for message in self.direct])


class Item(NamedTuple):
    """A part of a stream: the same elements of each of some local tensors, one tensor after the other.

    Attributes:
        tensors: the indices of the moves whose tensors these are.
        itemsize: the bytes of an element as it travels.
        box: of the local tensors.
        first, last: of the box, counted row-major, the elements from `first` to `last - 1`.
    """

    tensors: tuple[int, ...]
    itemsize: int
    box: Box
    first: int
    last: int

    @property
    def step(self) -> int:
        """The bytes that each tensor has in it."""
        return (self.last - self.first) * self.itemsize

    def cut(self, low: int, high: int) -> Iterator[Item]:
        """Yield the items that lie between the bytes `low` and `high` of this one.

        Both ends are rounded down to a whole element, by the exchange that ends there and by the one that begins there.
        Items of whole tensors stay together; a tensor that is cut gets an item of its own.
        """
        count = self.last - self.first  # elements of each tensor
        begin, end = max(low, 0) // self.itemsize, min(high // self.itemsize, count * len(self.tensors))
        while begin < end:
            number, skipped = divmod(begin, count)
            if skipped or end - begin < count:
                upto = min(count, skipped + end - begin)
                yield self._replace(tensors=(self.tensors[number],), first=self.first + skipped, last=self.first + upto)
                begin += upto - skipped
            else:
                whole = (end - begin) // count
                yield self._replace(tensors=self.tensors[number : number + whole])
                begin += whole * count


class Stream:
    """All that one rank sends to another in a run, in one order that both know.

    Attributes:
        items: by descending width of their elements.
        begins: for each item the byte of the stream at which it begins.
        size: bytes.
    """

    __slots__ = ("begins", "items", "size")

    def __init__(self, items: Iterable[Item]) -> None:
        # By the first move within a width: both ends know the moves by the same indices.
        self.items = sorted(items, key=lambda item: (-item.itemsize, item.tensors[0]))
        self.begins, self.size = [], 0
        for item in self.items:
            self.begins.append(self.size)
            self.size += item.step * len(item.tensors)

    def cut(self, number: int, count: int) -> Iterator[Item]:
        """Yield the items of the stream that one exchange carries: part `number` of `count` equal parts of its
        bytes. Each end is rounded down to a whole element."""
        if count == 1:
            yield from self.items
            return
        low, high = self.size * number // count, self.size * (number + 1) // count
        at = max(bisect_right(self.begins, low) - 1, 0)
        while at < len(self.items) and self.begins[at] < high:
            yield from self.items[at].cut(low - self.begins[at], high - self.begins[at])
            at += 1


class BudgetTooSmall(ValueError):
    """The budget of a transfer leaves its buffers no room.

    Args:
        why: in words.
        needed: a budget that is enough, in bytes. More makes for fewer exchanges.

    Attributes:
        why, needed: as given.
    """

    def __init__(self, why: str, needed: int) -> None:
        super().__init__(f"{why} Give at least {needed} bytes.")
        self.why, self.needed = why, needed


class Schedule(NamedTuple):
    """What one rank does in a run.

    Attributes:
        sends: for each rank to which it sends, the stream; by ascending rank.
        receives: for each rank from which it gets something, the stream; by ascending rank.
        kept: for each box that this rank has in its source and wants in its target, the index of the move, and where
            the box lies in the local tensor of the source and of the target.
    """

    sends: dict[int, Stream]
    receives: dict[int, Stream]
    kept: list[tuple[int, Box, Box]]

    @staticmethod
    def of(moves: Sequence[AnyMove], rank: int, gone: frozenset[int] = frozenset()) -> Schedule:
        """Compute the schedule of a rank."""
        send_shares = shares_of_replicas([move for move in moves if isinstance(move, Move)], gone)
        # The 32 equal layers of a model are planned once.
        alike: dict[AnyMove, list[int]] = {}
        for number, move in enumerate(moves):
            alike.setdefault(move, []).append(number)
        out: dict[int, list[Item]] = {}
        into: dict[int, list[Item]] = {}
        kept: list[tuple[int, Box, Box]] = []
        for move, numbers in alike.items():
            held, wanted = move.held(rank), move.wanted(rank)
            if held is None and wanted is None:
                continue
            sends, receives, boxes = move.routes(rank, send_shares)
            for by_peer, shares, local in ((out, sends, held), (into, receives, wanted)):
                for peer, box, first, last in shares:
                    item = Item(tuple(numbers), move.itemsize, box.inside(local), first, last)  # type: ignore[arg-type]
                    by_peer.setdefault(peer, []).append(item)
            if held is not None and wanted is not None:
                kept += [(number, box.inside(held), box.inside(wanted)) for number in numbers for box in boxes]
        streams = [{peer: Stream(by_peer[peer]) for peer in sorted(by_peer)} for by_peer in (out, into)]
        return Schedule(streams[0], streams[1], kept)

    def in_order(self, place: Mapping[int, int]) -> Schedule:
        """Return the schedule with its streams in the order in which the group has the ranks, as an all-to-all
        needs."""
        streams = [{peer: by_peer[peer] for peer in sorted(by_peer, key=place.__getitem__)} for by_peer in self[:2]]
        return Schedule(streams[0], streams[1], self.kept)

    @property
    def reads(self) -> set[int]:
        """The indices of the moves whose source this rank reads, to send it or to copy it into its own target."""
        return {number for number, *_ in self.kept}.union(*map(_tensors, self.sends.values()))

    @property
    def writes(self) -> set[int]:
        """The indices of the moves whose target on this rank gets something from another rank."""
        return set[int]().union(*map(_tensors, self.receives.values()))

    @property
    def sent(self) -> int:
        """The bytes that this rank sends to others in a run."""
        return sum([stream.size for stream in self.sends.values()])

    @property
    def received(self) -> int:
        """The bytes that this rank gets from others in a run."""
        return sum([stream.size for stream in self.receives.values()])

    @property
    def staged(self) -> int:
        """The bytes for which buffers are needed, over all exchanges of a run: those sent, those received, and the more
        of both once again, since the next exchange is packed, or the last one unpacked, while one runs."""
        return self.sent + self.received + max(self.sent, self.received)

    def buffered(self, count: int) -> int:
        """Return the bytes in buffers at one time if the run has `count` exchanges."""
        return -(-self.staged // count) if count > 1 else self.sent + self.received

    def least(self, budget: int) -> int:
        """Return the fewest exchanges with which this rank has at most `budget` bytes in buffers."""
        out, into = ROUNDED * len(self.sends), ROUNDED * len(self.receives)
        # One exchange needs no third buffer: nothing is packed or unpacked beside it.
        if self.sent + out + self.received + into <= budget:
            return 1
        room = budget - out - into - max(out, into)
        if room <= 0:
            why = f"a rank has messages to {len(self.sends)} ranks and from {len(self.receives)}"
            raise BudgetTooSmall(f"A budget of {budget} bytes is too small: {why}.", 4 * (budget - room))
        return max(2, -(-self.staged // room))

    def packed(self, number: int, count: int, large: Large | None = None) -> Messages:
        """Return what this rank sends in exchange `number` of `count`."""
        return _messages(self.sends, number, count, large)

    def landed(self, number: int, count: int, large: Large | None = None) -> Messages:
        """Return what this rank receives in exchange `number` of `count`."""
        return _messages(self.receives, number, count, large)


def _tensors(stream: Stream) -> set[int]:
    """Return the indices of the moves of which a stream carries something."""
    return {number for item in stream.items for number in item.tensors}


@lru_cache(maxsize=4)
def _kept_schedule(moves: tuple[AnyMove, ...], rank: int) -> Schedule:
    """Return `Schedule.of(moves, rank)`, remembered by value."""
    return Schedule.of(moves, rank)


def kept_schedule(moves: Sequence[AnyMove], rank: int, ranks: int) -> Schedule:
    """Return the schedule of a rank, and remember it: a program that saves its model does so again and again."""
    return _kept_schedule(tuple(moves), rank) if len(moves) * ranks <= KEPT else Schedule.of(moves, rank)


def _messages(streams: dict[int, Stream], number: int, count: int, large: Large | None) -> Messages:
    """Lay out the messages of exchange `number` of `count`, one behind the other, in the order of the streams."""
    sizes: dict[int, int] = {}
    loads: list[Load] = []
    direct: list[Direct] = []
    at = 0
    for peer, stream in streams.items():
        begin, tag = at, 0
        for item in stream.cut(number, count):
            if large is not None and large.takes(item):
                for tensor in item.tensors:
                    for message in _cut_small(item._replace(tensors=(tensor,)), large.most):
                        direct.append(Direct(peer, tag, message))
                        tag += 1
                continue
            loads += loads_of(item, at)
            at += item.step * len(item.tensors)
        at = aligned(at)
        if at > begin:
            sizes[peer] = at - begin
    return Messages(sizes, joined(loads), direct)


def loads_of(item: Item, at: int) -> Iterator[Load]:
    """Yield the loads of an item that begins at byte `at` of the buffer.

    There is one load if the item's elements are a box; else one for each box and tensor.
    """
    boxes = blocks(item.box, item.first, item.last)
    if len(boxes) == 1:
        yield Load(item.tensors, boxes[0], at, item.step)
        return
    for tensor in item.tensors:
        for block in boxes:
            yield Load((tensor,), block, at, 0)
            at += block.elements * item.itemsize


def joined(loads: Iterable[Load]) -> list[Load]:
    """Join loads of the same tensors that are parts of one block, so that one call copies all parts.

    From Shard(0) to Shard(1), say, each rank sends some columns of its rows to every other rank: joined, all its rows.
    """
    result: list[Load] = []
    latest: dict[tuple[int, ...], int] = {}  # for each tuple of tensors the index of its last load
    for load in loads:
        number = latest.get(load.tensors)
        both = None if number is None else result[number].then(load)
        if both is not None:
            result[number] = both  # type: ignore[index]
        else:
            latest[load.tensors] = len(result)
            result.append(load)
    return result


def _cut_small(item: Item, most: int) -> Iterator[Item]:
    """Cut an item of one tensor into items of at most `most` bytes: between rows of dim 0, if a row is shorter."""
    step = max(most // item.itemsize, 1)
    row = item.box.elements // item.box.length[0] if item.box.length else 1
    step -= step % row if row <= step else 0
    begin = item.first
    while begin < item.last:
        end = min(begin // step * step + step, item.last)
        yield item._replace(first=begin, last=end)
        begin = end


class Flow(NamedTuple):
    """What all ranks send to one another in a run.

    Attributes:
        sent: for each pair of sender and receiver the bytes.
        exchanges: how many there are.
        staged: the most bytes that a rank has in buffers at one time.
    """

    sent: Counter[tuple[int, int]]
    exchanges: int
    staged: int

    @staticmethod
    def of(moves: Sequence[AnyMove], budget: int, gone: frozenset[int] = frozenset()) -> Flow:
        """Compute the schedules of all ranks, and add them up."""
        ranks = {rank for move in moves for rank in move.members}
        schedules = {rank: Schedule.of(moves, rank, gone) for rank in sorted(ranks - gone)}
        sent: Counter[tuple[int, int]] = Counter()
        for rank, schedule in schedules.items():
            sent.update({(rank, peer): stream.size for peer, stream in schedule.sends.items()})
        if not any(schedule.sent for schedule in schedules.values()):
            return Flow(sent, 0, 0)
        count = max([schedule.least(budget) for schedule in schedules.values()])
        return Flow(sent, count, max([each.buffered(count) for each in schedules.values()]))

    def __add__(self, other: Flow) -> Flow:  # type: ignore[override]
        """Return the flow of both, one after the other."""
        return Flow(self.sent + other.sent, self.exchanges + other.exchanges, max(self.staged, other.staged))

    def beside(self, other: Flow) -> Flow:
        """Return the flow of both at the same time, on different ranks."""
        return Flow(self.sent + other.sent, max(self.exchanges, other.exchanges), max(self.staged, other.staged))


NOTHING = Flow(Counter(), 0, 0)
