"""Schedules: what one rank packs and lands in each of the exchanges that bring all tensors where they are wanted.

All that goes from one rank to another is a stream of bytes, those of the widest elements first, so that everything in a
message lies aligned to its own width. Each exchange carries the same share of every stream: what one rank sends in one
exchange is then the same share of all it sends, sender and receiver know it without asking, and all that ranks have
to agree on is how many exchanges there are. A tensor that is larger than its share is cut. What is large can travel by
itself, from tensor to tensor, and need not be packed: see `Large`.

Two exchanges are in memory at a time: one is packed while the other runs, and one lands while the next runs. So a rank
that sends S bytes and gets R holds at most (S + R + max(S, R)) / count of them, and `least` gives the number of
exchanges with which this stays within a budget. Standard library only.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ...distributed.tensor._planner.regions import Box
from .routes import Move, balance

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from .piece_moves import PieceMove, PlannedMove

    AnyMove = Move | PieceMove | PlannedMove


ALIGNED = 16  # bytes: where a message begins; the widest element
ROUNDED = (
    2 * ALIGNED
)  # bytes by which a message may be longer than its share: to a whole element, and to the next begin
KEPT = 1 << 15  # pieces, or fewer, of a schedule that is remembered


def aligned(size: int) -> int:
    """Bytes up to where the next message can begin."""
    return size + -size % ALIGNED


class Load(NamedTuple):
    """Blocks of local tensors that lie alike, each in one message, or in equal parts in several.

    Attributes:
        tensors: the numbers of these tensors.
        box: where the block lies in each local tensor.
        at: where the first tensor's block, or its first part, lies in all that is sent in the exchange, or in all that
            comes; in bytes, as are the other distances.
        step: from one tensor's to the next one's.
        parts, dim: into how many parts the block is cut, along which dim.
        apart: from one part to the next.
    """

    tensors: tuple[int, ...]
    box: Box
    at: int
    step: int
    parts: int = 1
    dim: int = 0
    apart: int = 0

    def then(self, part: Load) -> Load | None:
        """Both as one, where the other one is the next part of the same blocks."""
        (start, length), apart = self.box, part.at - self.at - (self.parts - 1) * self.apart
        dims = [dim for dim, (one, other) in enumerate(zip(start, part.box.start)) if one != other]
        if len(dims) != 1 or self.step != part.step or (self.parts > 1 and (*dims, apart) != (self.dim, self.apart)):
            return None
        (dim,) = dims
        inner = (*length[:dim], length[dim] // self.parts, *length[dim + 1 :])
        if part.box.length != inner or part.box.start[dim] != start[dim] + length[dim]:
            return None
        longer = (*length[:dim], length[dim] + inner[dim], *length[dim + 1 :])
        return self._replace(box=Box(start, longer), parts=self.parts + 1, dim=dim, apart=apart)


class Large(NamedTuple):
    """What travels by itself and isn't packed with other pieces.

    Attributes:
        least: bytes of a piece that is large.
        most: bytes of one message; a piece is cut into messages.
    """

    least: int
    most: int

    def takes(self, item: Item) -> bool:
        """Whether an item travels by itself."""
        return item.step >= self.least


class Direct(NamedTuple):
    """A message that is nothing but elements `first` to before `last` of a box of a local tensor.

    Attributes:
        tag: tells it from the other ones between two ranks in one exchange.
    """

    peer: int
    tag: int
    item: Item

    @property
    def size(self) -> int:
        """In bytes."""
        return self.item.step


class Messages(NamedTuple):
    """One direction of an exchange: bytes to or from each peer, which follow one another, what is in them, and what
    travels by itself."""

    sizes: dict[int, int]
    loads: list[Load]
    direct: list[Direct]

    @property
    def size(self) -> int:
        """In bytes, with what fills up to the next begin."""
        return sum(self.sizes.values()) + sum([message.size for message in self.direct])


class Item(NamedTuple):
    """The part of a stream that belongs to tensors that move alike: of one after the other, elements `first` to before
    `last` of a box of the local tensor."""

    tensors: tuple[int, ...]
    itemsize: int
    box: Box
    first: int
    last: int

    @property
    def step(self) -> int:
        """The bytes of each tensor."""
        return (self.last - self.first) * self.itemsize

    def cut(self, low: int, high: int) -> Iterator[Item]:
        """What begins at one byte of it, or later, and ends at another, in whole elements."""
        each = self.last - self.first
        begin, end = max(low, 0) // self.itemsize, min(high // self.itemsize, each * len(self.tensors))
        while begin < end:
            number, skipped = divmod(begin, each)
            if skipped or end - begin < each:
                upto = min(each, skipped + end - begin)
                yield self._replace(tensors=(self.tensors[number],), first=self.first + skipped, last=self.first + upto)
                begin += upto - skipped
            else:
                whole = (end - begin) // each
                yield self._replace(tensors=self.tensors[number : number + whole])
                begin += whole * each


class Stream:
    """All that goes from one rank to another."""

    __slots__ = ("begins", "items", "size")

    def __init__(self, items: Iterable[Item]) -> None:
        self.items = sorted(items, key=lambda item: (-item.itemsize, item.tensors[0]))
        self.begins, self.size = [], 0
        for item in self.items:
            self.begins.append(self.size)
            self.size += item.step * len(item.tensors)

    def cut(self, number: int, count: int) -> Iterator[Item]:
        """What of it is in one of so many exchanges."""
        if count == 1:
            yield from self.items
            return
        low, high = self.size * number // count, self.size * (number + 1) // count
        at = max(bisect_right(self.begins, low) - 1, 0)
        while at < len(self.items) and self.begins[at] < high:
            yield from self.items[at].cut(low - self.begins[at], high - self.begins[at])
            at += 1


class Schedule(NamedTuple):
    """What one rank does.

    Attributes:
        sends, receives: the stream to, or from, each other rank, ascending.
        kept: of each box that this rank has in place, the number of its tensor and where that lies in its source and
            in its target.
    """

    sends: dict[int, Stream]
    receives: dict[int, Stream]
    kept: list[tuple[int, Box, Box]]

    @staticmethod
    def of(moves: Sequence[AnyMove], rank: int, gone: frozenset[int] = frozenset()) -> Schedule:
        """All moves of a transfer, the same on every rank. Ranks that are gone send nothing."""
        weights = balance([move for move in moves if isinstance(move, Move)], gone)
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
            given, taken, stays = move.routes(rank, weights)
            for found, pieces, local in ((out, given, held), (into, taken, wanted)):
                for peer, box, first, last in pieces:
                    item = Item(tuple(numbers), move.itemsize, box.inside(local), first, last)  # type: ignore[arg-type]
                    found.setdefault(peer, []).append(item)
            if held is not None and wanted is not None:
                kept += [(number, box.inside(held), box.inside(wanted)) for number in numbers for box in stays]
        streams = [{peer: Stream(found[peer]) for peer in sorted(found)} for found in (out, into)]
        return Schedule(streams[0], streams[1], kept)

    def in_order(self, place: Mapping[int, int]) -> Schedule:
        """The same, with messages laid out in the order of these places of the ranks."""
        streams = [{peer: found[peer] for peer in sorted(found, key=place.__getitem__)} for found in self[:2]]
        return Schedule(streams[0], streams[1], self.kept)

    @property
    def reads(self) -> set[int]:
        """Numbers of the tensors whose sources are sent, or kept here."""
        return {number for number, *_ in self.kept}.union(*map(_tensors, self.sends.values()))

    @property
    def writes(self) -> set[int]:
        """Numbers of the tensors whose targets get something from another rank."""
        return set[int]().union(*map(_tensors, self.receives.values()))

    @property
    def sent(self) -> int:
        """The bytes that go to others."""
        return sum([stream.size for stream in self.sends.values()])

    @property
    def received(self) -> int:
        """The bytes that come from others."""
        return sum([stream.size for stream in self.receives.values()])

    @property
    def staged(self) -> int:
        """The bytes that pass through memory: what is sent, what comes, and the larger of both once more, since the
        next exchange is packed, and the last one lands, while one runs."""
        return self.sent + self.received + max(self.sent, self.received)

    def buffered(self, count: int) -> int:
        """The bytes in buffers at one time, in so many exchanges."""
        return -(-self.staged // count) if count > 1 else self.sent + self.received

    def least(self, budget: int) -> int:
        """The fewest exchanges with which this rank stages at most `budget` bytes.

        Raises:
            ValueError: none would do: the budget is too small for so many messages.
        """
        out, into = ROUNDED * len(self.sends), ROUNDED * len(self.receives)
        if self.sent + out + self.received + into <= budget:
            return 1
        room = budget - out - into - max(out, into)
        if room <= 0:
            raise ValueError(
                f"A budget of {budget} bytes is too small: a rank has messages to {len(self.sends)} ranks and from "
                f"{len(self.receives)}. Give at least {4 * (budget - room)} bytes."
            )
        return max(2, -(-self.staged // room))

    def packed(self, number: int, count: int, large: Large | None = None) -> Messages:
        """What is sent in one of so many exchanges. All ranks agree on what is large; by default nothing is."""
        return _messages(self.sends, number, count, large)

    def landed(self, number: int, count: int, large: Large | None = None) -> Messages:
        """What comes in one of so many exchanges."""
        return _messages(self.receives, number, count, large)


def _tensors(stream: Stream) -> set[int]:
    return {number for item in stream.items for number in item.tensors}


@lru_cache(maxsize=4)
def _kept_schedule(moves: tuple[AnyMove, ...], rank: int) -> Schedule:
    return Schedule.of(moves, rank)


def kept_schedule(moves: Sequence[AnyMove], rank: int, ranks: int) -> Schedule:
    """The schedule of moves among so many ranks, remembered unless it may be large: a program that saves its model
    does so again and again."""
    return _kept_schedule(tuple(moves), rank) if len(moves) * ranks <= KEPT else Schedule.of(moves, rank)


def _messages(streams: dict[int, Stream], number: int, count: int, large: Large | None) -> Messages:
    sizes: dict[int, int] = {}
    loads: list[Load] = []
    direct: list[Direct] = []
    at = 0
    for peer, stream in streams.items():
        begin, alone = at, 0
        for item in stream.cut(number, count):
            if large is not None and large.takes(item):
                for tensor in item.tensors:
                    for message in _cut_small(item._replace(tensors=(tensor,)), large.most):
                        direct.append(Direct(peer, alone, message))
                        alone += 1
                continue
            loads += loads_of(item, at)
            at += item.step * len(item.tensors)
        at = aligned(at)
        if at > begin:
            sizes[peer] = at - begin
    return Messages(sizes, joined(loads), direct)


def loads_of(item: Item, at: int) -> Iterator[Load]:
    """An item that begins at this byte of what is sent, or comes."""
    found = blocks(item.box, item.first, item.last)
    if len(found) == 1:
        yield Load(item.tensors, found[0], at, item.step)
        return
    for tensor in item.tensors:
        for block in found:
            yield Load((tensor,), block, at, 0)
            at += block.elements * item.itemsize


def joined(loads: Iterable[Load]) -> list[Load]:
    """The same loads, those of one tensor that are parts of one block as one."""
    found: list[Load] = []
    latest: dict[tuple[int, ...], int] = {}
    for load in loads:
        number = latest.get(load.tensors)
        both = None if number is None else found[number].then(load)
        if both is not None:
            found[number] = both  # type: ignore[index]
        else:
            latest[load.tensors] = len(found)
            found.append(load)
    return found


def _cut_small(item: Item, most: int) -> Iterator[Item]:
    """An item in parts of at most so many bytes, cut between rows where rows are small enough."""
    step = max(most // item.itemsize, 1)
    row = item.box.elements // item.box.length[0] if item.box.length else 1
    step -= step % row if row <= step else 0
    begin = item.first
    while begin < item.last:
        end = min(begin // step * step + step, item.last)
        yield item._replace(first=begin, last=end)
        begin = end


def blocks(box: Box, first: int, last: int) -> list[Box]:
    """Elements `first` to before `last` of a box, row-major, as boxes in that order.

    >>> blocks(Box((0, 0), (4, 3)), 2, 9)  # the end of the first row, then two rows
    [Box(start=(0, 2), length=(1, 1)), Box(start=(1, 0), length=(2, 3))]
    """
    if first >= last:
        return []
    if (first, last) == (0, box.elements):
        return [box]
    (start, *starts), (_, *lengths) = box
    row = math.prod(lengths)
    inner = Box(tuple(starts), tuple(lengths))
    (top, skipped), (bottom, rest) = divmod(first, row), divmod(last, row)
    if top == bottom:
        return _at(start + top, blocks(inner, skipped, rest))
    found: list[Box] = []
    if skipped:
        found += _at(start + top, blocks(inner, skipped, row))
        top += 1
    if top < bottom:
        found.append(Box((start + top, *starts), (bottom - top, *lengths)))
    return found + _at(start + bottom, blocks(inner, 0, rest))


def _at(place: int, boxes: list[Box]) -> list[Box]:
    """In a tensor of one more dim, at a place of it."""
    return [Box((place, *box.start), (1, *box.length)) for box in boxes]


class Flow(NamedTuple):
    """What ranks send to one another.

    Attributes:
        sent: bytes by sender and receiver.
        exchanges: how many there are.
        staged: the most bytes that a rank has in buffers.
    """

    sent: Counter[tuple[int, int]]
    exchanges: int
    staged: int

    @staticmethod
    def of(moves: Sequence[AnyMove], budget: int, gone: frozenset[int] = frozenset()) -> Flow:
        """Of all moves of a transfer: what its ranks would find, each its own part.

        Raises:
            ValueError: the budget is too small.
        """
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
        """One after the other."""
        return Flow(self.sent + other.sent, self.exchanges + other.exchanges, max(self.staged, other.staged))

    def beside(self, other: Flow) -> Flow:
        """At the same time, on other ranks."""
        return Flow(self.sent + other.sent, max(self.exchanges, other.exchanges), max(self.staged, other.staged))


NOTHING = Flow(Counter(), 0, 0)
