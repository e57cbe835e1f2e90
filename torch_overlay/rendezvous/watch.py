"""`Watch`: ends waits that take too long, and finds out which rank is missing, so that no transfer hangs in silence.

Each rank has a watch for each of its transfers. It knows in which run and step the rank is, and whether the rank waits
for others there. Two threads look after all watches of a process, and launch nothing on a device:

- the clock ends a wait in which nothing moved for longer than the timeout, by closing the connections of that transfer
  (over a slow link, on which bytes come, a wait may take many timeouts);
- the listener asks the store once a second whether another rank has failed. If so, it answers with the step in which
  this rank is, and closes the connections, too.

The thread whose wait ended this way calls `Watch.settle`. It writes the failure into the store, if no rank did before,
waits a few seconds for the answers of all ranks, and finds out who is missing. The first rank to know writes that into
the store, too, so that all ranks raise the same error. A rank whose process was killed or stopped doesn't answer. One
that is busy, or hasn't come yet, does, since its listener runs beside its program.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from ..distributed._mesh.text import of_ranks
from ..errors import TransferFailed
from . import blocking, long_waits
from .blocking import ask_aside, in_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from torch.distributed import Store

logger = logging.getLogger(__name__)

TICK = 0.25  # seconds between two looks of the clock
LISTEN = 1.0  # seconds between two questions of the listener to the store
ASK = 0.05  # seconds between two questions of a rank that waits for answers
TOLD = 4.5  # seconds after its failure for which the rank that keeps the store waits until all others know of it
ANSWER = 3.5  # seconds in which ranks answer a call; more than LISTEN
GIVE_UP = 0.5  # seconds after which nobody waits any more for messages whose connections were closed
FIRST = 4.0  # seconds in which the store has to answer its first request, so that all ranks raise within five
STORE = 5.0  # seconds in which it has to answer all others, beside the wait for ranks
STATUS = 3.0  # seconds that `status()` waits for the answers; more than twice LISTEN
ASKED_AFTER = 2.0  # seconds of waiting after which `status()` asks the store which ranks are missing
CONNECT = timedelta(seconds=10)  # the least time that ranks get to connect, however short the timeout of a run is
OVER = 1 << 30  # the step of a rank whose run is over: greater than that of any other rank
CLOSED, ENDED = "it closed this Transfer", "its program ended"  # the texts of ranks that left


class Position(NamedTuple):
    """Where a rank is in its runs.

    Attributes:
        run: the number of the run, from 1; 0 while the transfer is made.
        step: how many steps of the run it has begun; OVER after the run. The same step has one number on all ranks.
        waits: True if it waits for other ranks in this step.
        text: the step in words; CLOSED or ENDED if the rank has left.
        seconds: for how long it has been in this step.
        still: for how long nothing was sent or came there.
    """

    run: int
    step: int
    waits: bool
    text: str
    seconds: float = 0.0
    still: float = 0.0

    @property
    def in_words(self) -> str:
        """What the rank does."""
        if self.text in (CLOSED, ENDED):
            return f"{self.text} {f'after run {self.run}' if self.run else 'before its first run'}"
        return f"it is {self.text}, for {self.seconds:.0f} s"


class Failure(NamedTuple):
    """The failure of a transfer, as all ranks know it.

    Attributes:
        rank: the first one that noticed it.
        run: in which that rank was then.
        text: the step in which it was, in words.
        why: its error, if the rank itself failed; empty if it waited for others.
        is_timeout: True if the rank waited for longer than the timeout; False if a connection broke.
    """

    rank: int
    run: int
    text: str
    why: str
    is_timeout: bool


class Movement(NamedTuple):
    """When bytes moved last on this rank: in which run and step, how many its connections had carried, and when the
    clock saw it; 0 if it saw none."""

    step: tuple[int, ...]
    carried: int
    moved: float


class Lease(NamedTuple):
    """How long this rank may wait in its step because bytes move elsewhere: the step, how often the ranks were asked,
    until when, and the answer that extends it, if they are asked now."""

    step: tuple[int, ...]
    number: int
    until: float
    ends: Future[float] | None


class Watch:
    """The watch of one transfer on one rank.

    Args:
        ranks: those of the transfer.
        rank: this one.
        store: of all ranks; its keys belong to this transfer alone. All threads use it, so no request may wait in it.
        timeout: how long the rank waits for others in one step.
        keeper: the rank whose process has the store; None if nobody knows.
        close_connections: ends all waits in the transfer's groups with an error. Called once, by any thread.
        carried: the bytes that the connections carried so far. Called by the clock.
        count_failure: called before other ranks hear of a failure of this rank.
        keeps_store: whether the store may end with this process.
        ends_surely: whether a run doesn't end on this rank once others may have heard that it failed, so that all know
            on which ranks it has.

    Attributes:
        is_cut: True once the connections are closed, or are being closed.
        said: how the transfer failed, in words; None as long as it hasn't, or nobody has asked.
        gone: then also the ranks that don't answer any more, or whose programs ended.
        failed: then also the rank whose own error it was, if it was one.
        reached: then also, if it `ends_surely`, the run and the step in which each rank was that answered. None of them
            has gone on since.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        store: Store,
        timeout: timedelta,
        keeper: int | None,
        close_connections: Callable[[], None],
        carried: Callable[[], int] = int,
        count_failure: Callable[[], object] = lambda: None,
        keeps_store: bool = False,
        ends_surely: bool = False,
    ) -> None:
        self.ranks, self.rank, self.timeout, self._keeper = tuple(ranks), rank, timeout, keeper
        self._ends_surely = ends_surely
        self._keeps_store = keeps_store
        self._store = store
        self._close_connections, self._count_failure = close_connections, count_failure
        self._carried, self._movement = carried, Movement((0, 0), 0, 0.0)
        self._lease: Lease | None = None
        # The position and when it was entered. Replaced as a whole, since other threads read it without a lock.
        self._at = Position(0, 0, False, "making"), time.monotonic()
        self._begun, self._waited = time.monotonic(), 0.0  # the run, and for how long it has waited in steps before
        self._logged_in_runs = -1, -1  # the last runs in which this rank said that it works, or waits, for long
        self._asked: list[str] = []  # under which keys ranks that waited for long asked all others
        self._answered = 0  # calls of other ranks that this one has answered
        self._can_listen = True  # whether the store still answers
        self._lock = threading.Lock()
        self.is_cut = False  # whether the connections are closed, or are being closed
        self._is_late = False  # whether the clock closed them
        self._cut_at = 0.0  # when they were closed
        self._settled_at = 0.0  # when this rank began to find out why
        self._asks_since: float | None = None  # for how long the listener has waited for an answer of the store
        self.said: str | None = None  # how the transfer failed, in words, once it has
        self.gone: tuple[int, ...] = ()
        self.failed: tuple[int, ...] = ()
        self.reached: dict[int, tuple[int, int]] = {}
        self._failed_run = 0  # the run in which it failed
        _threads.add(self)

    @property
    def position(self) -> Position:
        """Where this rank is now."""
        (position, since), movement, now = self._at, self._movement, time.monotonic()
        moved = movement.moved if movement.step == position[:2] else 0.0
        return position._replace(seconds=now - since, still=now - max(since, moved))

    def begin(self, text: str, waits: bool = False) -> bool:
        """Note that this rank begins its next run. If the connections were closed since the last run, this first
        finds out why, which takes a few seconds."""
        run = self._at[0].run + 1
        if self.said is None and self.is_cut:
            self.said = self._learn(None)
            if self._failed_run >= run:
                return False
        if self.said is not None:
            said = f"This Transfer failed before, and can't run again: {self.advice}"
            raise TransferFailed(said, self.gone, failed=self.failed)
        self._begun, self._waited = time.monotonic(), 0.0
        self._at = Position(run, 1, waits, text), self._begun
        return True

    @property
    def advice(self) -> str:
        """What `said` says, and what to do."""
        gone = f", with gone={self.gone}" if self.gone else ""
        return f"{self.said} Close it, and make another one{gone}."

    def enter(self, text: str, waits: bool = False) -> None:
        """Note that this rank begins the next step of its run."""
        if self.is_cut:
            raise RuntimeError("the connections of this Transfer were closed")
        position = self._ends_wait()[0]
        self._at = Position(position.run, position.step + 1, waits, text), time.monotonic()

    def _ends_wait(self) -> tuple[Position, float]:
        position, since = self._at
        if position.waits:
            self._waited += time.monotonic() - since
        return position, since

    def does(self, text: str) -> None:
        """Note what this rank does within its step, in words. Steps are counted as before, alike on all ranks."""
        position, since = self._at
        self._at = position._replace(text=text), since

    def came(self) -> None:
        """Note that all ranks have come for which this step waited. What fails from now on is this rank's own fault."""
        position, since = self._ends_wait()
        # When NCCL aborts an exchange, its wait returns as if the exchange had ended.
        if not self.is_cut:
            self._at = position._replace(waits=False), since

    def end(self) -> None:
        """Note that this rank's run is over. Raises if it `ends_surely`, and has failed."""
        with self._lock:
            if self._ends_surely and self.is_cut:
                raise RuntimeError("the connections of this Transfer were closed")
            self.skip()

    def skip(self) -> None:
        """Note that this rank's run is over, though it failed."""
        self._at = Position(self._at[0].run, OVER, False, "not in a run"), time.monotonic()

    def has_reached(self, step: int, ranks: Iterable[int]) -> bool:
        """True if one of these ranks began this step of the run that failed on this rank; OVER is its end."""
        position = self._at[0]
        run = position.run + (position.step == OVER)
        return any(self.reached.get(rank, (-1, 0)) >= (run, step) for rank in ranks)

    def settle(self, error: BaseException, is_own: bool) -> str:
        """Tell the other ranks of an error in a run, close the connections, and find out with all ranks who is missing.
        The transfer can't run again after that.

        Waits up to ANSWER seconds for the answers of ranks, and up to FIRST + STORE seconds more for a store that
        doesn't answer.
        """
        position = self.position
        failure = Failure(
            self.rank, position.run, position.text, str(error) if is_own and not self.is_cut else "", self._is_late
        )
        self.said = self._learn(failure)
        return self.said

    def _learn(self, own: Failure | None) -> str:
        """Find out how the transfer failed, and return it in words. Closes the connections."""
        self._settled_at = time.monotonic()
        answers = threading.Event()
        found = ask_aside(lambda: self._find_missing(own, answers))
        found.add_done_callback(lambda _: answers.set())  # a store that is gone raises at once
        # The listener may have asked before: an answer that is late for it is late for all.
        asks_since = self._asks_since
        asked = 0.0 if asks_since is None else time.monotonic() - asks_since
        if answers.wait(max(FIRST - asked, ASK)):
            try:
                return self._explain(found.result(ANSWER + STORE))
            except (FutureTimeout, RuntimeError):
                pass
        self.cut()
        who = "the store of these ranks doesn't answer: who keeps it died, or this host is cut off"
        if self._keeper is not None and self._keeper != self.rank:
            self.gone = (self._keeper,)
            died = "which kept the store: it died, or left after a failure that it named"
            who = f"no answer any more from {of_ranks([self._keeper])}, {died}"
        return f"run {self.position.run}, {self.position.text}: {who}."

    def _find_missing(self, own: Failure | None, store_answers: threading.Event) -> dict[str, Any]:
        """Agree with all ranks on which failure was the first, and on who is missing. Closes the connections.
        `compare_set` makes the first rank to write decide for all."""
        store = self._store
        if own is not None:
            self._count_failure()
            number = store.add("calls", 1)
            store_answers.set()
            first = json.loads(store.compare_set("failure", "", json.dumps([*own, number])))
            store.set(f"call {number}", "failure" if first[-1] == number else "nothing")
        else:
            first = json.loads(store.get("failure"))
            store_answers.set()
        number, failure = first.pop(), Failure(*first)
        position = self.position
        self.cut()
        if own is not None:
            self._answer(number, position)
        missing: list[list[Any]] = []
        reached: dict[str, tuple[int, int]] = {}
        if not failure.why or self._ends_surely:
            if not store.check(["missing"]):
                answers = self._answers(number, ANSWER, decided="missing")
                missing = [] if failure.why else self._missing(failure, answers)
                reached = {str(rank): (at.run, at.step) for rank, at in answers.items()}
            missing, reached = json.loads(store.compare_set("missing", "", json.dumps([missing, reached])))
        store.set(f"informed {self.rank}", "")
        if self._keeps_store:
            self._wait_for_others(number)
        return {"failure": failure, "missing": missing, "reached": reached}

    def _wait_for_others(self, number: int) -> None:
        """Wait until all ranks that answered a call know what failed. If this program ended before, and the store with
        it, they would name nobody."""
        store, until = self._store, self._settled_at + TOLD
        answered = [rank for rank in self.ranks if store.check([f"answer {number} {rank}"])]
        # Not how many: one that knew first may have closed the Transfer by now.
        awaited = [f"informed {rank}" for rank in answered if not store.check([f"closed {rank}"])]
        while not store.check(awaited) and time.monotonic() < until:
            time.sleep(ASK)

    def _missing(self, failure: Failure, answers: dict[int, Position]) -> list[list[Any]]:
        """Find the ranks for which others wait."""
        absent: list[list[Any]] = [[rank, None, True] for rank in self.ranks if rank not in answers]
        left = [
            [rank, at.in_words, at.text == ENDED]
            for rank, at in answers.items()
            if at.text in (CLOSED, ENDED) and at.run < failure.run
        ]
        if (absent or left) and not failure.is_timeout:
            # A connection broke, since a process died or left. Ranks that haven't come yet may just be on their way.
            return sorted(absent + left, key=lambda each: each[0])
        waiting = [(at.run, at.step) for at in answers.values() if at.waits]
        furthest = max(waiting, default=(failure.run, 1))
        late = {rank: at for rank, at in answers.items() if (at.run, at.step) < furthest}
        behind = {rank: at for rank, at in late.items() if not at.waits}
        # The first rank to fail may be one that saw its connection closed by another, whose wait took too long.
        took_long = any(at.waits and at.seconds > self.timeout.total_seconds() for at in answers.values())
        if late and not behind and not absent and (failure.is_timeout or took_long):
            # All ranks have begun the step in which the last of these wait, so nobody is missing there: they, or what
            # connects them, are too slow. A thread that the machine doesn't run looks so, within a collective.
            last = min((at.run, at.step) for at in late.values())
            behind = {rank: at for rank, at in late.items() if (at.run, at.step) == last}
        found = [[rank, at.in_words, at.text == ENDED] for rank, at in behind.items()]
        return sorted(absent + found, key=lambda each: each[0])

    def _explain(self, found: dict[str, Any]) -> str:
        """Write what `_find_missing` returned as a sentence for an error. Sets `gone`, `failed` and `reached`."""
        failure: Failure = found["failure"]
        self._failed_run = failure.run
        self.gone = tuple([rank for rank, _, is_gone in found["missing"] if is_gone])
        self.reached = {int(rank): (run, step) for rank, (run, step) in found["reached"].items()}
        where = f"run {failure.run}, {failure.text}" if failure.run else "making it"
        if failure.why:
            self.failed = (failure.rank,)
            return f"{where}: {of_ranks([failure.rank])} failed: {failure.why.removesuffix('.')}."
        absent = [rank for rank, does, _ in found["missing"] if does is None]
        said = []
        if absent:
            said.append(f"no answer any more from {of_ranks(absent)}")
            if absent == [self._keeper]:
                said[0] += ", which kept the store: it died, or left after a failure that it named"
        said += [f"rank {rank} didn't come: {does}" for rank, does, _ in found["missing"] if does is not None]
        if not said:
            said = ["all ranks answer, so that a connection between two of them broke, or is too slow"]
        late = f", waited for longer than {self.timeout.total_seconds():g} s" if failure.is_timeout else ""
        return f"{where}{late}: {'; '.join(said)}."

    def cut(self) -> None:
        """Close the connections of the transfer. A second call does nothing. An error in closing them is only
        logged."""
        if self._begin_cut():
            self._end_cut()

    def _begin_cut(self) -> bool:
        with self._lock:
            was_cut, self.is_cut = self.is_cut, True
            self._cut_at = self._cut_at if was_cut else time.monotonic()
        return not was_cut

    def _end_cut(self) -> None:
        try:
            self._close_connections()
        except Exception:
            logger.debug("closing the connections of a Transfer failed", exc_info=True)

    def gives_up(self) -> bool:
        """True if the connections were closed some time ago. gloo doesn't end each wait then: where a host's cable was
        cut, one for a large message went on for a minute."""
        return self.is_cut and time.monotonic() - self._cut_at > GIVE_UP

    def check_timeout(self) -> None:
        """Close the connections if this rank waits for longer than the timeout. Called by the clock."""
        position = self.position
        limit = (self.timeout if position.run else max(self.timeout, CONNECT)).total_seconds()
        if self.is_cut:
            return
        if position.waits and self._is_over(position, limit):
            self._is_late = True
            self.cut()
        elif position.step not in (0, OVER):
            self._say_if_long(position, limit)

    def _is_over(self, position: Position, limit: float) -> bool:
        """True if for `limit` seconds nothing was sent or came in this step, neither here nor on ranks for which this
        one waits, as far as these answer. Asks them in time, and never waits for them."""
        now, step = time.monotonic(), position[:2]
        if position.seconds > limit / 8:  # long before anybody asks
            carried, before = self._carried(), self._movement
            if before.step != step:
                self._movement = Movement(step, carried, 0.0)
            elif carried > before.carried:
                self._movement = Movement(step, carried, now)
        lease = self._lease
        if lease is None or lease.step != step:
            lease = Lease(step, 0, 0.0, None)
        until = max(lease.until, now - self.position.still + limit)
        # Over a link that is full an answer takes seconds.
        if now < until - min(max(2 * LISTEN, 0.5 * limit), 10.0):
            lease = lease._replace(ends=None)  # what was asked before more bytes came
        elif lease.ends is None:
            key = f"late {position.run} {position.step} {lease.number}"
            ends = ask_aside(lambda: self._ends(position, key, limit, until - now))
            lease = Lease(step, lease.number + 1, until, ends)
        elif now > until and lease.ends is not None and lease.ends.done() and not lease.ends.exception():
            until = max(until, lease.ends.result())
            lease = Lease(step, lease.number, until, None)
        self._lease = lease
        return now > until + (LISTEN if lease.ends is not None and not lease.ends.done() else 0.0)

    def _ends(self, position: Position, key: str, limit: float, seconds: float) -> float:
        """Until when this rank may wait: `limit` after something moved on the ranks for which it waits. Asks the store,
        for about so many seconds."""
        answers = self._shared_answers(key, max(seconds, 2 * LISTEN))
        asked = time.monotonic()
        # Who hasn't come to this run, or left it, holds it up, whatever moves between others. Who doesn't answer may be
        # behind a link that is full; if he died, those that wait for him alone soon are still, too.
        if any(at.run < position.run or (at.step != OVER and at.text in (CLOSED, ENDED)) for at in answers.values()):
            return 0.0
        step = position.run, position.step
        behind = [at.still for at in answers.values() if (at.run, at.step) < step]
        moved = [at.still for at in answers.values() if (at.run, at.step) == step and at.still < at.seconds]
        return asked + limit - min(behind + moved, default=math.inf)

    def _say_if_long(self, position: Position, limit: float) -> None:
        """Log, once in each run, that this rank waits for long, and that it works for long."""
        worked, waited = self._logged_in_runs
        works_for = time.monotonic() - self._begun - self._waited
        if position.waits and position.seconds > long_waits.LONG and waited < position.run:
            self._logged_in_runs = worked, position.run
            ask_aside(lambda: self._say_wait(position, limit))
        elif not position.waits and works_for > long_waits.LONG and worked < position.run:
            self._logged_in_runs = position.run, waited
            long_waits.say_work(self.rank, works_for, f"{position.text}, in {self._where(position)}")

    def _where(self, position: Position) -> str:
        """The run in which a rank is, in words."""
        of = f"a Transfer over {of_ranks(self.ranks)}"
        return f"run {position.run} of {of}" if position.run else f"making {of}"

    def _say_wait(self, position: Position, limit: float) -> None:
        """Find out for which ranks this one waits, and log it, unless they have come meanwhile."""
        missing: list[list[Any]] = []
        with contextlib.suppress(FutureTimeout, RuntimeError):
            missing = self._missing(self._late_at(position), self._shared_answers(f"long {position.run}", 2 * LISTEN))
        now = self.position
        if now[:4] == position[:4] and not self.is_cut:
            doing = {
                rank: "it doesn't answer" if does is None else does for rank, does, _ in missing if rank != self.rank
            }
            where = f"{self._where(position)}, {position.text}"
            long_waits.say_wait(self.rank, now.seconds, [*doing], where, limit, doing)

    def listen(self) -> None:
        """Answer the calls of other ranks, and close the connections if one of them failed. Called by the listener."""
        try:
            self._asks_since = time.monotonic()
            while self._can_listen and self._store.check([f"call {self._answered + 1}"]):
                self._answered += 1
                # First of all, so that a run which hasn't ended, as the answer says, doesn't end any more.
                closes = self._store.get(f"call {self._answered}") == b"failure" and self._begin_cut()
                self._answer(self._answered, self.position)
                if closes:
                    self._end_cut()
        except RuntimeError:
            self._can_listen = False
            raise
        finally:
            self._asks_since = None

    def _answer(self, number: int, position: Position) -> None:
        """Answer a call with the position of this rank."""
        self._store.set(f"answer {number} {self.rank}", json.dumps(position))

    def _answers(self, number: int, seconds: float, decided: str = "") -> dict[int, Position]:
        """Wait up to `seconds` for answers to a call, or until a rank has written the key `decided`. Returns those."""
        until = time.monotonic() + seconds
        awaited = [*self.ranks]
        if self._store.add("closed", 0):  # else one request for all of them
            awaited = [rank for rank in self.ranks if not self._store.check([f"closed {rank}"])]
        keys = [f"answer {number} {rank}" for rank in awaited]
        while keys and time.monotonic() < until and not self._store.check(keys):
            if decided and self._store.check([decided]):
                break
            time.sleep(ASK)
        positions = {}
        for rank in self.ranks:
            key = next((k for k in (f"answer {number} {rank}", f"closed {rank}") if self._store.check([k])), None)
            if key is not None:
                positions[rank] = Position(*json.loads(self._store.get(key)))
        return positions

    def waited_for(self) -> list[int]:
        """Ask all ranks where they are, and return those for which this rank waits. Takes up to twice LISTEN
        seconds."""
        return [rank for rank, *_ in self._waited_for()]

    def _waited_for(self) -> list[list[Any]]:
        """Do what `waited_for` does. Returns what `_missing` returns."""
        return self._missing(self._late_at(self.position), self._ask_all(2 * LISTEN))

    def _late_at(self, position: Position) -> Failure:
        return Failure(self.rank, position.run, position.text, "", True)

    def _ask_all(self, seconds: float) -> dict[int, Position]:
        """Ask all ranks where they are. Takes up to `seconds`."""
        number = self._store.add("calls", 1)
        self._store.set(f"call {number}", "question")
        self._answer(number, self.position)
        return self._answers(number, seconds)

    def _shared_answers(self, key: str, seconds: float) -> dict[int, Position]:
        """Do what `_ask_all` does, once for all ranks that ask under this key: the first one asks, and the others read
        what it was told. An answer of each rank to each would be too much."""
        store, answers = self._store, f"{key} answers"
        self._asked.append(key)
        if store.add(key, 1) == 1:
            said = self._ask_all(seconds)
            store.set(answers, json.dumps(said))
            return said
        until = time.monotonic() + seconds + LISTEN
        while not store.check([answers]):
            if time.monotonic() > until:
                raise FutureTimeout
            time.sleep(LISTEN / 4)
        return {int(rank): Position(*at) for rank, at in json.loads(store.get(answers)).items()}

    def close(self, why: str = CLOSED) -> None:
        """Stop watching. The other ranks find in the store how far this rank came, and why it left; the last one to
        close deletes the transfer's keys. Waits for the store for at most twice LISTEN seconds, and raises nothing
        if it is gone."""
        _threads.discard(self)
        try:
            in_time(lambda: self._leave(why), 2 * LISTEN)
        except (FutureTimeout, RuntimeError):
            pass  # the store is gone, or the interpreter ends: the others see that this rank doesn't answer

    def _leave(self, why: str) -> None:
        """Write into the store how far this rank came, and why it leaves."""
        store = self._store
        store.set(f"closed {self.rank}", json.dumps(self.position._replace(waits=False, text=why)))
        if store.add("closed", 1) < len(self.ranks):
            return
        calls = range(1, store.add("calls", 0) + 1)
        keys = [f"{said} {rank}" for rank in self.ranks for said in ("closed", "informed")]
        keys += [f"call {n}" for n in calls] + ["failure", "missing"]
        keys += [each for key in self._asked for each in (key, f"{key} answers")]
        for key in (*keys, *[f"answer {n} {rank}" for n in calls for rank in self.ranks], "calls", "closed"):
            store.delete_key(key)


class _Threads:
    """The clock and the listener of this process. They start with the first watch, and end after the last one."""

    def __init__(self) -> None:
        self.watches: WeakSet[Watch] = WeakSet()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()

    def add(self, watch: Watch) -> None:
        """Look after a watch from now on. Starts the threads if they don't run."""
        with self._lock:
            self.watches.add(watch)
            if not self._threads:
                self._ended = threading.Event()
                for name, check, seconds in (
                    ("clock", Watch.check_timeout, TICK),
                    ("listener", Watch.listen, LISTEN),
                ):
                    given = check, seconds, self._ended
                    thread = threading.Thread(
                        target=self._loop, args=given, name=f"torch_overlay {name} of transfers", daemon=True
                    )
                    self._threads.append(thread)
                    thread.start()

    def discard(self, watch: Watch) -> None:
        """Look after a watch no more. Ends the threads if it was the last one."""
        with self._lock:
            self.watches.discard(watch)
            if not self.watches:
                self._stop()

    def _stop(self) -> None:
        """Let the threads end within their next interval."""
        self._ended.set()
        self._threads = []

    def end(self) -> None:
        """End the threads, and wait up to LISTEN seconds for each. Called at the end of the interpreter: a thread that
        woke up while it is torn down would end the process."""
        threads = self._threads
        with self._lock:
            self._stop()
        for thread in threads:
            thread.join(LISTEN)

    def forget(self) -> None:
        """Drop all threads and watches. Called in a forked child, in which the parent's threads don't run; one of them
        may have held the lock when the process was forked."""
        self.__init__()  # type: ignore[misc]

    def _loop(self, check: Callable[[Watch], None], seconds: float, ended: threading.Event) -> None:
        """Call `check` for each watch every `seconds`, until `ended` is set or no watch is left. Runs on a thread."""
        while not ended.wait(seconds):
            with self._lock:
                watches = [*self.watches]
            for watch in watches:
                try:
                    check(watch)
                except Exception:
                    logger.debug("looking after a Transfer failed", exc_info=True)
            del watches  # or this thread would keep them alive until its next look
            if not self.watches:
                with self._lock:
                    if not self.watches and self._ended is ended:
                        self._stop()


_threads = _Threads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.forget)


def end_threads() -> None:
    """End the clock, the listener and the waiter. Called at the end of the process."""
    _threads.end()
    blocking.end()


def under_way() -> tuple[str, ...]:
    """Describe each transfer of this process that is in a run: the run, the step, and the ranks for which it waits.
    Empty if none is.

    Takes a few seconds if one has waited for longer than ASKED_AFTER, since it then asks the other ranks.
    """
    transfers = []
    with _threads._lock:
        watches = [*_threads.watches]
    for watch in sorted(watches, key=lambda watch: watch.ranks):
        position = watch.position
        if position.step in (0, OVER) or watch.said is not None:
            continue
        is_long = position.waits and position.seconds > ASKED_AFTER
        transfers.append((watch.ranks, position, ask_aside(watch.waited_for) if is_long else None))
    until = time.monotonic() + STATUS  # for all of them together
    return tuple([_in_words(*transfer, until) for transfer in transfers])


def _in_words(ranks: Sequence[int], position: Position, asked: Future[list[int]] | None, until: float) -> str:
    """Describe a transfer that is in a run."""
    run = f"run {position.run}" if position.run else "making it"
    said = f"Transfer over {of_ranks(ranks)}: {run}, {position.text}, for {position.seconds:.0f} s"
    if asked is None:
        return said
    try:
        missing = asked.result(max(0.0, until - time.monotonic()))
    except (FutureTimeout, RuntimeError):
        return f"{said}; the store doesn't say for whom"
    return f"{said}; waits for {of_ranks(missing)}" if missing else f"{said}; all ranks are there"
