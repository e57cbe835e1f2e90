"""Meetings: all ranks of a group come together and each says something; whoever is missing is named.

By the store of the group and not by a collective: a collective that lacks a rank says that some time has passed.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroup

from ..distributed._mesh.text import of_ranks, ranks_text
from .groups import timeout_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

    from .place import Seal

_numbers: WeakKeyDictionary[ProcessGroup, Counter[str]] = WeakKeyDictionary()


def living(ranks: Any, what: str, size: int | None = None) -> list[int]:
    """Ranks as a user gives them, each of which there is, in the world or among so many.

    Raises:
        TypeError: what is given is no list of ranks; a rank outside of a group has no group to give.
        ValueError: a rank can't exist, or stands there twice; nobody would ever come for it.
    """
    if not isinstance(ranks, Collection) or not all(isinstance(rank, int) for rank in ranks):
        who = f" that rank {dist.get_rank()} is in" if dist.is_initialized() else ""
        raise TypeError(f"{what} needs a process group{who}, or a list of ranks; got {ranks!r}")
    last = (dist.get_world_size() if size is None else size) - 1
    beyond = sorted({rank for rank in ranks if not 0 <= rank <= last})
    if beyond:
        there = "This world" if size is None else "This place"
        raise ValueError(f"{what} has ranks that can't exist: {beyond}. {there} has {of_ranks(range(last + 1))}.")
    twice = sorted([rank for rank, count in Counter(ranks).items() if count > 1])
    if twice:
        raise ValueError(f"{what} has rank {ranks_text(twice)} twice: {[*ranks]}.")
    return [*ranks]


def in_world(group: ProcessGroup | Sequence[int] | None, purpose: str) -> Meeting:
    """The next meeting of a group, of these ranks of the world, or of all.

    Raises:
        TypeError, ValueError: see `living`; or this rank isn't one of them.
    """
    world = distributed_c10d._get_default_group()
    if group is None or isinstance(group, ProcessGroup):
        ranks: list[int] = dist.get_process_group_ranks(group or world)
        timeout, name = timeout_of(group or world), (group or world).group_name
    else:
        ranks, timeout = sorted(living(group, "group")), timeout_of(world)
        name = hashlib.sha256(repr(ranks).encode()).hexdigest()
    if dist.get_rank() not in ranks:
        raise ValueError(f"{purpose} of {of_ranks(ranks)} can't be made by rank {dist.get_rank()}.")
    held = _numbers.setdefault(world, Counter())
    held[name] += 1
    store = dist.PrefixStore(f"torch_overlay/{name}/{held[name]}", distributed_c10d._get_default_store())
    return Meeting(ranks, dist.get_rank(), store, timeout, purpose)


class Meeting:
    """One meeting of some ranks; they hold their meetings in the same order.

    Args:
        store: for this meeting alone.
        seal: signs what is said; None where who reaches the store is trusted.
        hint: what to do if a rank doesn't come.
        keeper: the rank whose process has the store; None if nobody knows.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        store: Store,
        timeout: timedelta,
        purpose: str,
        seal: Seal | None = None,
        hint: str = "",
        keeper: int | None = None,
    ) -> None:
        self.ranks, self.rank, self.store = ranks, rank, store
        self.timeout, self.purpose, self._seal, self.keeper = timeout, purpose, seal, keeper
        self._hint = hint or (
            "All of these ranks call it, in one order with what else they do; a rank without a part gives None."
        )

    def say(self, what: Any) -> dict[int, Any]:
        """What each rank says, by rank: what JSON takes, and reading it runs nothing. Equal things are stored once,
        whoever says them, and are one object.

        Raises:
            RuntimeError: a rank didn't come within the group's timeout, or this one came too late.
            ValueError: what a rank said isn't signed with the key that this one has.
        """
        try:
            return self._exchange(zlib.compress(json.dumps(what).encode()))
        except dist.DistNetworkError as error:
            who = "the rank" if self.keeper is None else f"rank {self.keeper}"
            raise RuntimeError(f"{self.purpose}: {who} that keeps the store of these ranks left, or died.") from error

    def _exchange(self, said: bytes) -> dict[int, Any]:
        key = hashlib.sha256(said).hexdigest()
        if not self.store.check([key]):
            self.store.set(key, said)
        own = f"rank {self.rank}"
        self.store.set(own, key if self._seal is None else f"{key} {self._seal.of(self.purpose, own, key)}")
        self._wait()
        names = [f"rank {rank}" for rank in self.ranks]
        keys = dict(zip(self.ranks, self._signed(self._words(names))))
        known = {key: self._read(key) for key in {*keys.values()}}
        self._clear([*known, *names])
        return {rank: known[key] for rank, key in keys.items()}

    def _signed(self, words: list[str]) -> list[str]:
        """The keys under which ranks say something."""
        if self._seal is None:
            signed = [rank for rank, word in zip(self.ranks, words) if " " in word]
            if signed:
                raise ValueError(
                    f"{self.purpose}: {of_ranks(signed)} signed with a key, and rank {self.rank} has none."
                )
            return words
        keys, strangers = [], []
        for rank, word in zip(self.ranks, words):
            key, _, seal = word.partition(" ")
            keys.append(key)
            if not self._seal.fits(seal, self.purpose, f"rank {rank}", key):
                strangers.append(rank)
        if strangers:
            raise ValueError(
                f"{self.purpose}: what {of_ranks(strangers)} said isn't signed with the key that rank {self.rank} has. "
                "All give the same key, or somebody else is there."
            )
        return keys

    def _read(self, key: str) -> Any:
        said = self.store.get(key)
        if hashlib.sha256(said).hexdigest() != key:
            raise ValueError(f"{self.purpose}: somebody changed what a rank said.")
        return json.loads(zlib.decompress(said))

    def _words(self, names: list[str]) -> list[str]:
        """What stands there, by one request where the store can."""
        found = self.store.multi_get(names) if self.store.has_extended_api() else map(self.store.get, names)
        return [word.decode() for word in found]

    def _wait(self) -> None:
        missing: list[int] = []
        problem = None
        try:
            self.store.wait([f"rank {rank}" for rank in self.ranks], self.timeout)
        except RuntimeError as error:
            missing, problem = [rank for rank in self.ranks if not self.store.check([f"rank {rank}"])], error
        # The first to know decides for all, or some would go on without the others.
        missing = json.loads(self.store.compare_set("missing", "", json.dumps(missing)))
        if missing:
            raise RuntimeError(self._missing(missing)) from problem

    def _missing(self, ranks: list[int]) -> str:
        limit = f"{self.timeout.total_seconds():g} s"
        return (
            f"{self.purpose} needs {of_ranks(self.ranks)}, and {of_ranks(ranks)} didn't come within {limit}. "
            f"{self._hint}"
        )

    def _clear(self, keys: list[str]) -> None:
        """The last one to have read everything leaves nothing behind."""
        if self.store.add("left", 1) == len(self.ranks):
            for key in (*keys, "missing", "left"):
                self.store.delete_key(key)


def no_answer(meeting: Meeting, ranks: Sequence[int]) -> str:
    """That these ranks don't answer, in words."""
    died = ", which kept the store: it died, or left after a failure that it named" if ranks == [meeting.keeper] else ""
    return f"no answer any more from {of_ranks(ranks)}{died}"


LONGEST = 5  # seconds that ranks wait for one another after a failure
ANSWER = 5  # seconds more in which the store has to answer


def silent_ranks(meeting: Meeting, ranks: Sequence[int], failure: str) -> list[int]:
    """After a failure, which of these ranks don't come within a few seconds to say that they met it, too.

    They died, hang, or had no part in what failed. If the store is gone as well, or doesn't answer, only the rank that
    kept it is named.
    """
    limit = min(meeting.timeout, timedelta(seconds=LONGEST))
    try:
        return in_time(lambda: _silent_ranks(meeting, ranks, failure, limit), limit.total_seconds() + ANSWER)
    except (FutureTimeout, RuntimeError):
        return [rank for rank in ranks if rank == meeting.keeper]


def in_time(ask: Callable[[], Any], seconds: float) -> Any:
    """What a store answers, asked on a thread that is left behind if it takes longer.

    A store whose process died waits for an answer without a limit where its connections stay open: as they do while a
    child that it forked lives, or where its host lost its power.

    Raises:
        FutureTimeout: it didn't answer in time; or what `ask` raises.
    """
    heard: Future[Any] = Future()

    def work() -> None:
        try:
            heard.set_result(ask())
        except Exception as error:
            heard.set_exception(error)

    Thread(target=work, name="torch_overlay asks a store", daemon=True).start()
    return heard.result(seconds)


def _silent_ranks(meeting: Meeting, ranks: Sequence[int], failure: str, limit: timedelta) -> list[int]:
    store = dist.PrefixStore(f"torch_overlay/{failure}", meeting.store)
    store.set(f"rank {meeting.rank}", "")
    try:
        store.wait([f"rank {rank}" for rank in ranks], limit)
    except RuntimeError:
        return [rank for rank in ranks if not store.check([f"rank {rank}"])]
    return []
