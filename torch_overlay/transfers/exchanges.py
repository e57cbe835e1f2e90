"""Run a schedule on tensors: pack, exchange, unpack. Start at `Exchanges.run`.

Blocks of tensors are copied into one flat buffer of bytes, sent by one all-to-all, and copied to where they belong.
While one all-to-all runs, the next buffer is packed and the one before is unpacked. On gloo, large pieces go directly
from tensor to tensor, beside the all-to-all.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._logging import trace_structured

from ..distributed._mesh.text import of_ranks
from ..distributed._torch import span
from ..distributed.tensor._runner.exchange import part
from ._planner.boxes import blocks
from ._planner.schedule import ROUNDED, BudgetTooSmall, Direct, Large, Load, aligned
from .blocks import Block, Buffers, Copied, Copies, Views, in_groups, locate_blocks, present
from .stats import added

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed import ProcessGroup, Work

    from ..rendezvous.team import Team
    from ..rendezvous.watch import Watch
    from ._planner.routes import Move
    from ._planner.schedule import Item, Messages, Schedule
    from .blocks import Locals, Wires


# --- Point-to-point messages: large pieces, which go from tensor to tensor and aren't packed with others ---
# A contiguous piece is sent from its tensor, and received into its tensor. Another piece is packed once for all ranks
# that get it. On the receiver it passes through a small window that is used again and again: memory that was touched
# before is several times as fast as new memory from the system.


# On 8 gloo ranks a strided piece of 128 KB takes twice as long as packed. From 256 KB on pieces that lie in one stretch
# save a copy for each rank that gets them: with a least of 1 MB a relay took 1.27 times as long.
LARGE_PIECES = Large(least=256 << 10, most=1 << 20)
IN_FLIGHT = 8  # messages that may be under way through the window
TAGS = 1 << 20  # where the tags begin: above those of a program that sends messages in a mesh's group meanwhile


def large_on(team: Team) -> Large | None:
    """Return which pieces go directly: large ones on gloo, where a rank may send before the other one receives. None
    elsewhere, where all pieces go in the all-to-all: on NCCL, two ranks that both send first would deadlock."""
    return LARGE_PIECES if team.is_on_gloo else None


class P2PMessage(NamedTuple):
    """A point-to-point message, and where its bytes lie on this rank.

    Attributes:
        place: the position of the other rank in the group.
        tag: of the message.
        item: what it carries. Messages of equal items carry the same elements of one tensor to several ranks.
        flat: the block of its elements, if they are contiguous and keep their dtype; else None.
        copies: the blocks of its elements, if `flat` is None.
    """

    place: int
    tag: int
    item: Item
    flat: Block | None
    copies: Copies | None

    @property
    def size(self) -> int:
        """Bytes of the message."""
        return self.item.step

    @staticmethod
    def of(message: Direct, locals_: Locals, wires: Wires, place: int) -> P2PMessage:
        """Find out where the bytes of a message lie. Returns the message, which can be sent or received while the local
        tensors have this shape, strides and offset."""
        (tensor,), itemsize, box, first, last = message.item
        view = part(present(locals_[tensor]), box)
        flat = copies = None
        if view.is_contiguous() and wires[tensor] in (None, view.dtype):
            # Not the view's own strides: those of a dim of length 1 may be anything.
            flat = Block(tensor, (last - first,), (1,), view.storage_offset() + first)
        else:
            loads, at = [], 0
            for block in blocks(box, first, last):
                loads.append(Load((tensor,), block, at, 0))
                at += block.elements * itemsize
            copies = Copies(locate_blocks(loads, locals_, wires))
        return P2PMessage(place, TAGS + message.tag, message.item, flat, copies)


class P2PBatch:
    """All point-to-point messages of one exchange, to and from this rank.

    Attributes:
        writes: True if some message is received right into a target, which is written from the start on.
    """

    def __init__(self, out: Sequence[P2PMessage], into: Sequence[P2PMessage]) -> None:
        self._out = out
        self._straight = [(p2p, p2p.flat) for p2p in into if p2p.flat is not None]
        self._through = [p2p for p2p in into if p2p.flat is None]
        self.writes = bool(self._straight)
        copied = {p2p.item: p2p for p2p in out if p2p.copies is not None}
        # By descending width, so that each lies aligned in the buffer.
        self._copied = sorted(copied.values(), key=lambda p2p: -p2p.item.itemsize)

    def start(self, team: Team, buffers: Buffers, sources: Locals, targets: Locals) -> Callable[[], None]:
        """Begin all messages. Pieces that aren't contiguous are packed here."""
        if not self._out and not self._straight and not self._through:
            return lambda: None
        straight, group = [], team.group
        if group is None:
            raise AssertionError("a team with messages has a group")
        for p2p, flat in self._straight:
            straight.append(group.recv([flat.of(targets).view(torch.uint8)], p2p.place, p2p.tag))
        through = self._receive_through_window(team, group, buffers, targets)
        sizes = [p2p.size for p2p in self._copied]
        buffer = buffers.take(sum(sizes))
        places = buffer.split(sizes)
        copied = {p2p.item: place for p2p, place in zip(self._copied, places)}
        copies = {p2p.item: p2p.copies for p2p in self._copied}
        sent = []
        for p2p in self._out:
            if p2p.flat is not None:
                data = p2p.flat.of(sources).view(torch.uint8)
            else:
                data = copied[p2p.item]
                # Packed just before its first message, so that other ranks don't wait until all pieces are packed.
                if (copy := copies.pop(p2p.item, None)) is not None:
                    copy.pack(sources, data)
            sent.append(group.send([data], p2p.place, p2p.tag))

        def finish() -> None:
            """Wait for all messages, and give the buffer back."""
            through()
            for work in (*straight, *sent):
                team.wait(work)
            buffers.give(buffer)

        return finish

    @property
    def _window(self) -> list[int]:
        """The bytes of each slot of the window: as many as the longest message that passes through it has."""
        most = max([p2p.size for p2p in self._through], default=0)
        return [aligned(most)] * min(IN_FLIGHT, len(self._through))

    def _receive_through_window(
        self, team: Team, group: ProcessGroup, buffers: Buffers, targets: Locals
    ) -> Callable[[], None]:
        """Begin to receive the messages whose targets aren't contiguous, IN_FLIGHT at a time."""
        if not self._through:
            return lambda: None
        slots = self._window
        window = buffers.take(sum(slots))
        begun: deque[tuple[P2PMessage, torch.Tensor, Work]] = deque()
        waiting = iter(self._through)

        def begin(slot: torch.Tensor) -> None:
            """Receive the next message into a slot of the window, if there is one."""
            p2p = next(waiting, None)
            if p2p is not None:
                data = slot[: p2p.size]
                begun.append((p2p, slot, group.recv([data], p2p.place, p2p.tag)))

        for slot in window.split(slots):
            begin(slot)

        def finish() -> None:
            """Wait for each message in turn, and unpack it."""
            while begun:
                p2p, slot, work = begun.popleft()
                team.wait(work)
                if p2p.copies is not None:
                    p2p.copies.land(targets, slot[: p2p.size])
                begin(slot)
            buffers.give(window)

        return finish


def in_turns(messages: Sequence[Direct], own: int, places: dict[int, int]) -> list[Direct]:
    """Order point-to-point messages: the first message to or from each rank, then the second ones.

    Each rank begins with the rank after it in the group. If all began with rank 0, they would wait for it in turn.
    """
    size = len(places)
    return sorted(messages, key=lambda message: (message.tag, (places[message.peer] - own) % size))


class Direction(NamedTuple):
    """What this rank sends in one exchange, or what it receives, located in its local tensors.

    Attributes:
        splits: for each rank of the group the bytes of its packed message.
        copies: the blocks in the packed messages.
        p2p_messages: the point-to-point messages, in the order in which they begin.
    """

    splits: list[int]
    copies: Copies
    p2p_messages: list[P2PMessage]


class InFlight(NamedTuple):
    """An exchange that has begun. It holds the buffers until the exchange has ended.

    Attributes:
        work: of the all-to-all.
        sent, came: the buffers from which it sends, and into which it receives.
        finish: waits for the point-to-point messages.
    """

    work: dist.Work
    sent: torch.Tensor
    came: torch.Tensor
    finish: Callable[[], None]


class ToPassOn(Exception):
    """Nothing was sent, on any rank: in this run less goes over links between hosts if elements are passed on."""


class Torn(RuntimeError):
    """An exchange failed after some targets had been written: they are a mixture of old and new."""


def nothing(*_: object) -> None:
    """Do nothing, in place of a callback."""


class Going(NamedTuple):
    """How a run goes on this rank.

    Attributes:
        sent: called when no source is read any more.
        keeps: whether views of the tensors are kept for the next run. They hold if that gives the same `state`.
        watch: of the Transfer, if it has one.
        landed: called when an exchange has landed, with the bytes that it sent and brought.
        began: called when the first exchange is under way.
    """

    sent: Callable[[], None] = nothing
    keeps: bool = False
    watch: Watch | None = None
    state: object = None
    landed: Callable[[int], None] = nothing
    began: Callable[[], None] = nothing


GOING = Going()


class AnyExchanges(Protocol):
    """What runs a plan: the exchanges of one schedule (`Exchanges`, `ChangesOnly`), of the rounds of a checkpoint
    (`Rounds`) or of the parts of a relay (`Parts`).

    Attributes:
        reads: the moves, by position in the plan, whose source this rank sends or copies.
        written: those whose target the last run wrote, or began to write.
        label: stands before the number of an exchange in errors and profiles.
    """

    reads: frozenset[int]
    written: frozenset[int]
    label: str

    @property
    def count(self) -> int:
        """How many exchanges there are."""

    @property
    def staging(self) -> int:
        """The most bytes that buffers take at one time in a run."""

    @property
    def seconds(self) -> dict[str, float]:
        """What the last run took, by what this rank did."""

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank sent in the last run."""

    @property
    def received_bytes(self) -> int:
        """The bytes that came to this rank in the last run."""

    @property
    def changed(self) -> tuple[int, int]:
        """With `changes`: how many elements this rank sent in the last run, and of how many."""

    def run(self, sources: Locals, targets: Locals, going: Going = ...) -> None:
        """Write all targets. Collective."""

    def forget(self) -> None:
        """Let go of all views, and of what was sent."""

    def send_whole_next(self, ranks: Iterable[int] | None = None) -> None:
        """With `changes`: in the next run, send whole messages to these ranks; to all, if None."""


class InTurn:
    """Exchanges that run one after the other: the rounds of a checkpoint, or the parts of a relay.

    Args:
        every: in order.
    """

    def __init__(self, every: Sequence[AnyExchanges]) -> None:
        self._every = every
        self.label, self.reads, self.written = "", frozenset[int](), frozenset[int]()

    @property
    def count(self) -> int:
        return sum([each.count for each in self._every])

    @property
    def staging(self) -> int:
        return max([each.staging for each in self._every], default=0)

    @property
    def seconds(self) -> dict[str, float]:
        return added([each.seconds for each in self._every])

    @property
    def sent_bytes(self) -> int:
        return sum([each.sent_bytes for each in self._every])

    @property
    def received_bytes(self) -> int:
        return sum([each.received_bytes for each in self._every])

    @property
    def changed(self) -> tuple[int, int]:
        counts = [each.changed for each in self._every]
        return sum([elements for elements, _ in counts]), sum([total for _, total in counts])

    def forget(self) -> None:
        for each in self._every:
            each.forget()

    def send_whole_next(self, ranks: Iterable[int] | None = None) -> None:
        receivers = None if ranks is None else [*ranks]
        for each in self._every:
            each.send_whole_next(receivers)


class Exchanges:
    """The exchanges of one schedule on this rank. Made once, run often. See `AnyExchanges`.

    Args:
        schedule: of this rank. Its tensors are numbered by the move, and so are all lists of tensors here.
        count: how many exchanges there are, the same on every rank.
        team: the ranks that exchange.
        wires: for each move the dtype in which its tensor travels, None if its dtype doesn't change. If not given, none
            does.
        buffers: allocates the buffers; if not given, none is held between two runs.
    """

    def __init__(
        self,
        schedule: Schedule,
        count: int,
        team: Team,
        wires: Wires | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        self.count, self.team = count, team
        self._buffers = Buffers(team.device) if buffers is None else buffers
        self._large = large = large_on(team)
        self._place = {rank: place for place, rank in enumerate(team.ranks)}
        self.schedule = schedule = schedule.in_order(self._place)
        self._messages = [
            (schedule.packed(number, count, large), schedule.landed(number, count, large)) for number in range(count)
        ]
        self.reads, self.written = frozenset(schedule.reads), frozenset[int]()
        self.sent_bytes, self.received_bytes, self.changed, self.label = schedule.sent, schedule.received, (0, 0), ""
        self.seconds: dict[str, float] = {}
        self._writes = frozenset(schedule.writes)
        self._wires = wires
        self._landed, self._is_written = 0, False
        self._geometry: object = None
        self._directions: list[tuple[Direction, Direction]] = []
        self._p2p: list[P2PBatch] = []
        self._kept: list[tuple[Block, Block]] = []
        self._views = Views()
        self._watch: Watch | None = None
        self._landed_bytes: Callable[[int], None] = nothing
        self._began: Callable[[], None] = nothing
        self._ends: list[tuple[int, torch.Event]] = []
        self._kept_views: tuple[frozenset[int], list[Copied]] | None = None

    @property
    def staging(self) -> int:
        """The most bytes that buffers take at one time in a run, with those of point-to-point messages."""
        most = 0
        for number, (out, into) in enumerate(self._messages):
            packed, landed = self._messages[number + 1] if number + 1 < self.count else (None, None)
            following = (packed.size if packed else 0, landed.size if landed else 0)
            most = max(most, out.size + into.size + following[0], into.size + sum(following))
        return most

    def run(self, sources: Locals, targets: Locals, going: Going = GOING) -> None:
        """Write all targets. Collective over the team."""
        self._watch, self._landed_bytes, self._began, self.seconds = going.watch, going.landed, going.began, {}
        sent, keeps = going.sent, going.keeps
        wires = self._wires or [None] * len(sources)
        sources, targets = self._views.begin(sources, targets, wires, keeps, going.state)
        if self._geometry is None or not keeps or any(self._views.changed):
            self._find_blocks(sources, targets, wires)
            self._kept_views = None
        self._landed, self._is_written = 0, False
        self.written = self._writes
        try:
            self._exchange(sources, targets, sent)
            self._copy_kept(sources, targets)
            self._wait_for_device()
            if self._kept or not self.count:
                sent()
        except ToPassOn:
            raise
        except Exception as error:
            self.forget()
            self._buffers.forget()
            # After the last exchange, boxes that this rank has in its own source are copied. There may be no exchange.
            at = (
                f"{self.label}exchange {self._landed + 1} of {self.count}"
                if self._landed < self.count
                else "copying what is here"
            )
            said = f"{at} failed: {error}"
            if self._is_written:
                raise Torn(said) from error
            if isinstance(error, RuntimeError):
                raise RuntimeError(said) from error
            raise

    def _exchange(self, sources: Locals, targets: Locals, sent: Callable[[], None]) -> None:
        """Run all exchanges: while one runs, pack the next one and unpack the one before."""
        running = self._start(0, self._pack(0, sources), sources, targets) if self.count else None
        self._began()
        for number in range(1, self.count + 1):
            packed = self._pack(number, sources) if number < self.count else None
            came = self._await_exchange(number - 1, running, sent)
            running = None  # frees the buffer that was sent, before the next one is allocated
            if packed is not None:
                running, packed = self._start(number, packed, sources, targets), None
            self._is_written = True
            self._land(number - 1, came, targets)
            self._landed = number
            self._buffers.give(came)
            self._landed_bytes(sum([messages.size for messages in self._messages[number - 1]]))

    def _pack(self, number: int, sources: Locals) -> torch.Tensor:
        """Take a buffer, and pack into it what exchange `number` sends by its all-to-all."""
        direction = self._directions[number][0]
        with self._step(number, "pack"):
            buffer = self._buffers.take(sum(direction.splits))
            direction.copies.pack(sources, buffer, self._views)
        return buffer

    def _start(self, number: int, packed: torch.Tensor, sources: Locals, targets: Locals) -> InFlight:
        """Begin exchange `number`: its point-to-point messages and its all-to-all, from the buffer `packed`. Does not
        wait for either."""
        out, into = self._directions[number]
        self._is_written |= self._p2p[number].writes
        came = self._buffers.take(sum(into.splits))
        # Counts as a wait: if a rank has died, sending fails, and the fault is that rank's.
        with self._step(number, "send", waits=True):
            finish = self._p2p[number].start(self.team, self._buffers, sources, targets)
            work = self._swap(came, packed, into.splits, out.splits)
        return InFlight(work, packed, came, finish)

    def _swap(self, came: torch.Tensor, packed: torch.Tensor, into: Sequence[int], out: Sequence[int]) -> dist.Work:
        """Begin an all-to-all from `packed` into `came`."""
        if not len(packed) and len(came) and self.team.is_fake:
            # torch's fake backend refuses to send nothing. It brings nothing either: so this rank sends itself a byte,
            # and the buffer that counts stays as it is.
            own = [int(rank == self.team.rank) for rank in self._place]
            came, packed = came.new_empty(len(came) + 1), packed.new_empty(1)
            into, out = [size + extra for size, extra in zip(into, own, strict=True)], own
        exchange = self.team.call(dist.all_to_all_single)
        return exchange(came, packed, [*into], [*out], group=self.team.group, async_op=True)

    def _await_exchange(self, number: int, running: InFlight | None, sent: Callable[[], None]) -> torch.Tensor:
        """Wait for exchange `number`, and return the buffer into which it received. On a GPU only the stream waits.

        Calls `sent` in the last exchange when this rank's point-to-point messages are done, unless it copies from its
        sources after that.
        """
        if running is None:
            raise AssertionError("an exchange runs until its successor has begun")
        with self._step(number, "wait", waits=True):
            running.finish()
            if number == self.count - 1 and not self._kept:
                sent()  # the packed messages were copied from the sources; only receiving is left
            self._wait(running.work)
            if self.team.device.type != "cpu" and self._watch is not None:
                self._ends.append((number, torch.accelerator.current_stream(self.team.device).record_event()))
        self._buffers.give(running.sent)
        return running.came

    def _wait(self, work: dist.Work) -> None:
        """Wait until an all-to-all has ended. On NCCL only the stream waits."""
        if self._watch is not None and self.team.is_on_gloo:
            # It is given up some time after connections were closed. A rank that was stopped (SIGSTOP) within it, and
            # woke when all others had closed theirs, waited for a send that went nowhere.
            self.team.wait(work)
        else:
            work.wait()

    def _land(self, number: int, came: torch.Tensor, targets: Locals) -> None:
        """Unpack what exchange `number` received into the targets."""
        with self._step(number, "unpack"):
            self._directions[number][1].copies.land(targets, came, self._views)

    @contextmanager
    def _step(self, number: int, action: str, waits: bool = False) -> Iterator[None]:
        """Tell the watch and the profiler that a step of exchange `number` begins, and that it has ended."""
        text = f"{self.label}exchange {number + 1} of {self.count}, {action}"
        if self._watch is not None:
            self._watch.enter(text, waits)
        begun = time.perf_counter()
        with span(text):
            yield
        self.seconds[action] = self.seconds.get(action, 0.0) + time.perf_counter() - begun
        if waits and self._watch is not None:
            self._watch.came()

    def _wait_for_device(self) -> None:
        """Wait until the exchanges that this run has awaited have ended on the GPU.

        `wait` of an exchange on a GPU only makes the stream wait. If a rank has died, the exchange never ends there,
        and the program would go on as if its targets were written.
        """
        ends, self._ends = self._ends, []
        for number, end in ends:
            with self._step(number, "on the device", waits=True):
                self.team.wait_for_event(end)
        if ends and self._watch is not None:
            self._watch.enter("the end")  # raises if the watch has aborted the group: its events end, too

    def _copy_kept(self, sources: Locals, targets: Locals) -> None:
        """Copy the boxes that this rank has in its own sources into its targets, unless both are the same memory."""
        if self._kept_views is None:
            moved = []
            for before, after in self._kept:
                old, new = before.of(sources), after.of(targets)
                # An equal address isn't enough: a transposed view, or one of another dtype, begins there, too.
                if (new.data_ptr(), new.stride(), new.dtype) != (old.data_ptr(), old.stride(), old.dtype):
                    moved.append((after, new, old))
            blocks, into, out_of = ([*column] for column in zip(*moved)) if moved else ([], [], [])
            self._kept_views = self._writes.union(block.tensor for block in blocks), in_groups(blocks, into, out_of)
        self.written, groups = self._kept_views
        for into, out_of in groups:
            self._is_written = True
            torch._foreach_copy_(into, out_of)
        if not self._views.keeps:
            self._kept_views = None

    def forget(self) -> None:
        """Let go of all views, and of the memory that they hold. The next run makes them anew."""
        self._views.forget()
        self._kept_views = None

    def send_whole_next(self, ranks: Iterable[int] | None = None) -> None:
        """Do nothing: everything is sent whole."""

    def _find_blocks(self, sources: Locals, targets: Locals, wires: Wires) -> None:
        """Compute where all blocks lie in the local tensors, and store that, unless the tensors have the shapes,
        strides and offsets of the last run."""
        geometry = [None if t is None else (t.shape, t.stride(), t.storage_offset()) for t in (*sources, *targets)]
        if geometry == self._geometry:
            return
        self._views.drop_blocks()
        self._directions = [
            (self._locate(out, sources, wires), self._locate(into, targets, wires)) for out, into in self._messages
        ]
        self._p2p = [P2PBatch(out.p2p_messages, into.p2p_messages) for out, into in self._directions]
        self._kept = []
        for number, *boxes in self.schedule.kept:
            views = [part(present(side[number]), box) for side, box in zip((sources, targets), boxes)]
            is_dense = all(view.is_contiguous() for view in views)
            old, new = [Block.at(number, view, is_dense) for view in views]
            self._kept.append((old, new))
        self._geometry = geometry

    def _locate(self, messages: Messages, locals_: Locals, wires: Wires) -> Direction:
        """Locate all that this rank sends in an exchange, or all that it receives, in these local tensors."""
        splits = [0] * len(self._place)
        for peer, size in messages.sizes.items():
            splits[self._place[peer]] = size
        own = self._place[self.team.rank]
        direct = in_turns(messages.direct, own, self._place)
        p2p_messages = [P2PMessage.of(message, locals_, wires, self._place[message.peer]) for message in direct]
        return Direction(splits, Copies(locate_blocks(messages.loads, locals_, wires)), p2p_messages)


# --- How many exchanges there are, and what is logged of a plan ---


plan_logger = logging.getLogger("torch_overlay.transfers")


def log_plan(name: str, describe: Callable[[], str]) -> None:
    """Log a plan: as a DEBUG line of the logger torch_overlay.transfers, and as an artifact that tlparse shows."""
    if plan_logger.isEnabledFor(logging.DEBUG):
        plan_logger.debug("planned %s", describe())
    about = {"name": name, "encoding": "string"}
    trace_structured("artifact", lambda: about, payload_fn=describe, expect_trace_id=False)


Traffic = dict[int, tuple[int, int, int]]  # for each rank the bytes out, the bytes in, and the exchanges it needs


def most_bytes(moves: Iterable[Move], ranks: Sequence[int]) -> int:
    """Return a bound on the bytes that any of these ranks sends and gets, together, in these moves. It takes no
    communication, and every rank computes the same."""
    most = ROUNDED * 2 * len(ranks)
    for move in moves:
        most += move.itemsize * (len(ranks) * move.source.regions.most + move.target.regions.most)
    return most


def agreed_count(
    schedule: Schedule,
    budget: int,
    team: Team,
    is_wrong: bool = False,
    whole_budget: Callable[[int], int] = int,
) -> tuple[int, Traffic]:
    """Agree on how many exchanges there are: as many as the rank needs that needs most. Collective over the team."""
    problem = ""
    try:
        least = schedule.least(budget)
    except BudgetTooSmall as error:
        least, problem = -whole_budget(error.needed), error.why
    said = team.gather([int(is_wrong), schedule.sent, schedule.received, least])
    wrong = [rank for rank, (first, *_) in zip(team.ranks, said) if first]
    if wrong:
        raise RuntimeError(f"Nothing was redistributed: {of_ranks(wrong)} can't.")
    traffic: Traffic = {rank: (out, into, needed) for rank, (_, out, into, needed) in zip(team.ranks, said)}
    small = [rank for rank, (*_, needed) in traffic.items() if needed < 0]
    if small:
        needed = max(-needed for *_, needed in traffic.values())
        raise BudgetTooSmall(problem or f"The budget is too small for {of_ranks(small)}.", needed)
    is_idle = not any(sent for sent, *_ in traffic.values())
    return 0 if is_idle else max(needed for *_, needed in traffic.values()), traffic
