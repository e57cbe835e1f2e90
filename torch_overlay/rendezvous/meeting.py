"""`Meeting`: ranks exchange values through a store, and an error names the ranks that didn't come.

It uses the store and no collective: a collective that lacks a rank says only that a timeout has passed.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, distributed_c10d

from ..distributed._mesh.text import of_ranks, ranks_text
from . import long_waits
from .long_waits import LAST_MEETING
from .team import timeout_of

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store

    from .seal import Seal

SOON = 0.001  # seconds between two looks of a rank that waits: at least,
EACH = 1e-5  # for each rank of the meeting,
WAKE = 0.25  # and at most
MOST = 256  # ranks for which a rank that waits for long looks whether they have come
GIVEN_UP = 1.0  # seconds after which a rank that waits also looks whether others gave up

# For each world, how many meetings the ranks of a group, or of a list, have held. It makes the name of their next one.
_numbers: WeakKeyDictionary[ProcessGroup, Counter[str]] = WeakKeyDictionary()


def checked_ranks(ranks: Any, what: str, size: int | None = None) -> list[int]:
    """Check a list of ranks that a user gave, and return it."""
    if not isinstance(ranks, Collection) or not all(isinstance(rank, int) for rank in ranks):
        who = f" that rank {dist.get_rank()} is in" if dist.is_initialized() else ""
        raise TypeError(f"{what} needs a process group{who}, or a list of ranks; got {ranks!r}")
    last = (dist.get_world_size() if size is None else size) - 1
    beyond = sorted({rank for rank in ranks if not 0 <= rank <= last})
    if beyond:
        subject = "This world" if size is None else "This place"
        raise ValueError(f"{what} has ranks that can't exist: {beyond}. {subject} has {of_ranks(range(last + 1))}.")
    twice = sorted([rank for rank, count in Counter(ranks).items() if count > 1])
    if twice:
        raise ValueError(f"{what} has rank {ranks_text(twice)} twice: {[*ranks]}.")
    return [*ranks]


def in_world(group: ProcessGroup | Sequence[int] | None, purpose: str) -> Meeting:
    """Return the next meeting of some ranks of the world. All of them have to call this in one order, since meetings
    are counted."""
    world = distributed_c10d._get_default_group()
    if group is None or isinstance(group, ProcessGroup):
        ranks: list[int] = dist.get_process_group_ranks(group or world)
        timeout, name = timeout_of(group or world), (group or world).group_name
    else:
        ranks, timeout = sorted(checked_ranks(group, "group")), timeout_of(world)
        name = hashlib.sha256(repr(ranks).encode()).hexdigest()
    if dist.get_rank() not in ranks:
        raise ValueError(f"{purpose} of {of_ranks(ranks)} can't be made by rank {dist.get_rank()}.")
    counts = _numbers.setdefault(world, Counter())
    counts[name] += 1
    name = f"torch_overlay/{name}/{counts[name]}"
    return Meeting(name, ranks, dist.get_rank(), distributed_c10d._get_default_store(), timeout, purpose)


class Missing(RuntimeError):
    """Ranks didn't come to a meeting: `gone`."""

    def __init__(self, message: str, gone: tuple[int, ...]) -> None:
        super().__init__(message)
        self.gone = gone


class Meeting:
    """One meeting of some ranks, in which each tells all others one value. Ranks hold their meetings in one order.

    Args:
        name: of this meeting alone, the same on all ranks. Its keys in the store begin with it.
        rank: this one.
        store: of all ranks.
        timeout: how long a rank waits for the others.
        purpose: begins the errors, as "A Transfer".
        seal: signs what is said; None where every process that reaches the store is trusted.
        hint: ends the error about a rank that doesn't come: what to do.
        keeper: the rank whose process has the store; None if nobody knows.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        store: Store,
        timeout: timedelta,
        purpose: str,
        seal: Seal | None = None,
        hint: str = "",
        keeper: int | None = None,
    ) -> None:
        self.name, self.ranks, self.rank, self.store = name, ranks, rank, PrefixStore(name, store)
        self.timeout, self.purpose, self._seal, self.keeper = timeout, purpose, seal, keeper
        self._last_meetings = PrefixStore(LAST_MEETING, store)
        self._hint = hint or (
            "All of these ranks call it, in one order with what else they do; a rank without a part gives None."
        )

    def say(self, what: Any, own: str = "") -> dict[int, Any]:
        """Tell all ranks a value, and return the value of each rank, by rank. Collective.

        Values are what JSON takes, so that reading one runs no code. Equal values are stored and read once, and are
        returned as one object. `own` is a short text beside it, which may differ between ranks that say the same: what
        all ranks gave stands in `owns` afterwards.
        """
        try:
            return self._exchange(zlib.compress(json.dumps(what).encode()), own)
        except dist.DistNetworkError as error:
            who = "the rank" if self.keeper is None else f"rank {self.keeper}"
            raise RuntimeError(f"{self.purpose}: {who} that keeps the store of these ranks left, or died.") from error

    def _exchange(self, said: bytes, text: str) -> dict[int, Any]:
        """Do what `say` does, with the value as compressed JSON."""
        key = hashlib.sha256(said).hexdigest()
        if not self.store.check([key]):
            self.store.set(key, said)
        own = f"rank {self.rank}"
        # For ranks that wait for this one elsewhere.
        self._last_meetings.set(own, f"{self._where} (their number {self.name.rpartition('/')[2]})")
        word = f"{key}.{text.encode().hex()}"
        self.store.set(own, word if self._seal is None else f"{word} {self._seal.of(self.purpose, own, word)}")
        self._wait()
        names = [f"rank {rank}" for rank in self.ranks]
        pairs = [word.partition(".") for word in self._signed(self._words(names))]
        keys = dict(zip(self.ranks, [key for key, _, _ in pairs]))
        self.owns = dict(zip(self.ranks, [bytes.fromhex(coded).decode() for _, _, coded in pairs]))
        known = {key: self._read(key) for key in {*keys.values()}}
        self._clear([*known, *names])
        return {rank: known[key] for rank, key in keys.items()}

    def _signed(self, words: list[str]) -> list[str]:
        """Check what ranks stored under their names."""
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
        """Return the value with this hash."""
        said = self.store.get(key)
        if hashlib.sha256(said).hexdigest() != key:
            raise ValueError(f"{self.purpose}: somebody changed what a rank said.")
        return json.loads(zlib.decompress(said))

    def _words(self, names: list[str]) -> list[str]:
        """Return what ranks stored under their names, by one request if the store can do that. Waits for names that
        aren't there."""
        words = self.store.multi_get(names) if self.store.has_extended_api() else map(self.store.get, names)
        return [word.decode() for word in words]

    def _wait(self) -> None:
        """Wait until all ranks have come."""
        try:
            missing = self._late()
        except (KeyboardInterrupt, SystemExit):
            # This rank may live on and call this again, when the others, that come later, would go on without it.
            with suppress(RuntimeError):
                self.store.compare_set("missing", "", json.dumps([-1 - self.rank]))
            raise
        # The first rank to write decides for all. A rank may come just after another one has given up: without this,
        # it would go on, and the other would raise.
        missing = json.loads(self.store.compare_set("missing", "", json.dumps(missing)))
        if missing:
            raise Missing(self._missing(missing), tuple([rank for rank in missing if rank >= 0]))

    def _late(self) -> list[int]:
        """Wait until all ranks have come. Returns those that haven't within the timeout, or before one of them all said
        that some are missing."""
        begun, came, is_said = time.monotonic(), self._came(), False
        while came < len(self.ranks):
            waited = time.monotonic() - begun
            if waited > long_waits.LONG and not is_said:
                is_said, late = True, self._absent(self.ranks[came : came + MOST])
                where, limit = self._where, self.timeout.total_seconds()
                long_waits.say_wait(self.rank, waited, late, where, limit, self._elsewhere(late))
            if waited > self.timeout.total_seconds():
                return self._absent(self.ranks[came:])
            # Not by `store.wait`, in which Ctrl-C does nothing until its timeout, after which torch logs two warnings.
            # A share of what was waited: it costs next to nothing, and a late rank is seen almost at once.
            time.sleep(min(max(waited / 20, len(self.ranks) * EACH, SOON), WAKE))
            came = self._came(came)
            if waited > GIVEN_UP and self.store.check(["missing"]):
                break
        return []

    def _absent(self, ranks: Sequence[int]) -> list[int]:
        """Return those of the ranks that haven't come yet. By halves, which takes few requests if few are missing."""
        if not ranks or self.store.check([f"rank {rank}" for rank in ranks]):
            return []
        half = len(ranks) // 2
        return [*ranks] if not half else self._absent(ranks[:half]) + self._absent(ranks[half:])

    @property
    def _where(self) -> str:
        """The meeting in words, after "in"."""
        return f"{self.purpose[0].lower()}{self.purpose[1:]}, of {of_ranks(self.ranks)}"

    def _elsewhere(self, ranks: Sequence[int]) -> dict[int, str]:
        """For some ranks that haven't come, to which meeting they came last, in words."""
        words = {}
        for rank in ranks[: long_waits.SHOWN]:
            if self._last_meetings.check([f"rank {rank}"]):
                words[rank] = f"it last came to {self._last_meetings.get(f'rank {rank}').decode()}"
        return words

    def _came(self, known: int | None = None) -> int:
        """Return how many of the ranks, in order, have come before one that hasn't, of which `known` were found before.

        Of many ranks that wait, each asks for one other rank at a time, or else thousands of names would be looked up
        some times in a second for each of thousands of ranks.
        """
        names, first = [f"rank {rank}" for rank in self.ranks], known or 0
        if known is not None and not self.store.check(names[first : first + 1]):
            return first
        if self.store.check(names[first:]):
            return len(names)
        return bisect_left(range(len(names)), True, first, key=lambda n: not self.store.check(names[first : n + 1]))

    def _missing(self, ranks: list[int]) -> str:
        """Return the text of the error about ranks that didn't come."""
        if ranks[0] < 0:
            who = of_ranks([-1 - ranks[0]])
            return f"{self.purpose} needs {of_ranks(self.ranks)}, and {who} was interrupted in it. {self._hint}"
        limit = f"{self.timeout.total_seconds():g} s"
        if self.rank in ranks:
            return (
                f"{self.purpose} needs {of_ranks(self.ranks)}. The first of them waited {limit} for {of_ranks(ranks)}, "
                f"and gave up before rank {self.rank} came. If this rank left one out before, it calls this once more "
                f"than the others do. {self._hint}"
            )
        elsewhere = "; ".join([f"rank {rank}: {where}" for rank, where in self._elsewhere(ranks).items()])
        return (
            f"{self.purpose} needs {of_ranks(self.ranks)}, and {of_ranks(ranks)} didn't come within {limit}"
            f"{f' ({elsewhere})' if elsewhere else ''}. {self._hint}"
        )

    def _clear(self, keys: list[str]) -> None:
        """Delete the keys of this meeting, if this rank is the last one that has read everything."""
        if self.store.add("left", 1) == len(self.ranks):
            for key in (*keys, "missing", "left"):
                self.store.delete_key(key)
