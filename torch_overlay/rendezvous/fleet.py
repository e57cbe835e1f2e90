"""`Fleet`: the servers that come to an open place, and go. Start at `Fleet.begin_epoch`.

A unit is a server: its ranks come and go together. Each change makes a new epoch: rank 0 writes into the store which
units there are, and all others read it. Meetings and groups of one epoch have names of their own, so that nobody waits
in those of another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import time
from collections import deque
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, NamedTuple

from ..distributed._mesh.text import of_ranks
from .blocking import in_time
from .long_waits import LAST_MEETING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import timedelta

    from torch.distributed import Store

    from .seal import Seal

LEAVING = 2.0  # seconds that a store gets to hear that a server leaves
LOOK = 0.05  # seconds between two looks at the store
CLAIMED, LEFT, REFUSED = "claimed", "left", "refused"  # what becomes of a unit
READY = "ready"  # counts its ranks that make their Transfer
LATEST = "epochs"  # how many there were
logger = logging.getLogger(__name__)
KEPT = 16  # epochs that stay in the store, for ranks that are slow


class Unit(NamedTuple):
    """A server: ranks that come and go together.

    Attributes:
        number: counts those that came, from 1.
        name: tells units apart; a later one of the same name takes the place of the former.
        first: its first rank at the place; the others follow.
        size: how many ranks it has.
        nonce: a random number of its own.
    """

    number: int
    name: str
    first: int
    size: int
    nonce: str

    @property
    def ranks(self) -> range:
        """Its ranks at the place."""
        return range(self.first, self.first + self.size)


class Gone(NamedTuple):
    """A server that a Transfer dropped: its name, its ranks at the place, and why."""

    name: str
    ranks: tuple[int, ...]
    why: str


class Dropped(RuntimeError):
    """This server isn't in the fleet any more."""


class Fleet:
    """The units of an open place, as one rank knows them.

    Args:
        store: of the place.
        seal: signs what is written there; None without a key.
        trainers: how many ranks the place has beside its units.
        rank: this one; rank 0 decides. None on a server, which has none before `join`.
        timeout: for how long a rank waits for rank 0.

    Attributes:
        trainers: as given.
        units: those that are there.
        tag: of the present epoch, in the names of its meetings and groups.
        joined, gone: since the last call of `take_news`.
        is_used: whether there is a Transfer. A second one would miss who came for the first.
    """

    def __init__(self, store: Store, seal: Seal | None, trainers: int, rank: int | None, timeout: timedelta) -> None:
        self._store, self._seal, self._timeout = store, seal, timeout
        self._unit = 0  # the number of this rank's unit; 0 on a trainer
        self.trainers, self._rank = trainers, rank
        self.units: tuple[Unit, ...] = ()
        self.joined: list[Unit] = []
        self.gone: list[Gone] = []
        self._epoch, self._door, self.tag = 0, -1, ""
        # On rank 0: the units that came and weren't dropped, by number, None if one isn't complete; why others were, in
        # this epoch; how many came; and for each of the last epochs the keys, or what they begin with, that nobody
        # needs KEPT epochs later.
        self._known: dict[int, Unit | None] = {}
        self._why: dict[int, str] = {}
        self._count = 0
        self._litter: deque[list[str]] = deque([[]])
        self.is_used = self._has_knocked = self._has_left = False

    @property
    def ranks(self) -> list[int]:
        """The ranks of the trainers and of all units that are there."""
        return [*range(self.trainers), *[rank for unit in self.units for rank in unit.ranks]]

    def check_in(self) -> None:
        """Raise if this rank's server was dropped, or has left."""
        if self._has_left:
            raise Dropped("This server isn't among those of the trainers any more. Join again.")

    def take_news(self) -> tuple[tuple[str, ...], tuple[Gone, ...]]:
        """Return the names of those who came, and who went, since the last call, and log them."""
        for unit in self.joined:
            logger.info("the server %r joined, as %s", unit.name, of_ranks(unit.ranks))
        for name, ranks, why in self.gone:
            logger.warning("the server %r, %s, is gone: %s", name, of_ranks(ranks), why)
        joined, gone = tuple([unit.name for unit in self.joined]), tuple(self.gone)
        self.joined, self.gone = [], []
        return joined, gone

    def is_news(self) -> bool:
        """On rank 0: True if somebody came or left since it decided last. One request if nobody knocked."""
        is_news = self._rank == 0 and self._store.add("door", 0) != self._door and self._there() != self.units
        if is_news:
            self._door = -1  # until somebody takes them in: verify() asks, too, and doesn't
        return is_news

    def units_of(self, ranks: Iterable[int]) -> list[Unit]:
        """Return the units that have some of these ranks."""
        some = {*ranks}
        return [unit for unit in self.units if not some.isdisjoint(unit.ranks)]

    # --- Who is there ---

    def begin_epoch(self, lost: Mapping[int, str], takes_in: bool = True) -> None:
        """Begin the next epoch: without the units with the numbers `lost`, whose values say why, and with those at the
        door if it `takes_in`. All ranks of the place that are left call it."""
        self._epoch += 1
        if self._rank == 0:
            self._decide(lost, takes_in)
        self._follow()

    def _decide(self, lost: Mapping[int, str], takes_in: bool) -> None:
        self._why |= lost
        units = self._there()
        if not takes_in:
            units = tuple([unit for unit in units if unit in self.units])
            self._door = -1  # so that the next run sees who waits there
        gone = [[unit.name, [*unit.ranks], self._why.get(unit.number)] for unit in self.units if unit not in units]
        self._why.clear()
        self._write([[*unit] for unit in units], gone)

    def _there(self) -> tuple[Unit, ...]:
        """On rank 0: return the units that are there, and note why others aren't."""
        store, why = self._store, self._why
        self._door = store.add("door", 0)
        before, self._count = self._count, store.add("units", 0)
        self._known |= dict.fromkeys(range(before + 1, self._count + 1))
        newest: dict[str, int] = {}
        ready: set[int] = set()
        for number, unit in sorted(self._known.items()):
            if unit is None and number not in why and store.check([f"unit {number} {CLAIMED}"]):
                unit, problem = self._read_unit(number)
                if problem:
                    why[number] = problem
                    store.set(f"unit {number} {REFUSED}", problem)
            self._known[number] = unit
            if number not in why and store.check([f"unit {number} {LEFT}"]):
                why[number] = "it left"
            if number not in why and unit is not None:
                if unit.name in newest:
                    why[newest[unit.name]] = "a server of its name came"
                newest[unit.name] = number
                if unit in self.units or store.add(f"unit {number} {READY}", 0) == unit.size:
                    ready.add(number)
        for number in self._known.keys() & why.keys():
            self._forget(number)
        return tuple([unit for number, unit in self._known.items() if unit is not None and number in ready])

    def knock(self) -> None:
        """On a rank of a unit that is about to make its Transfer: trainers wait for it from now on. Does nothing the
        second time."""
        if self._unit and not self._has_knocked:
            self._has_knocked = True
            self._store.add(f"unit {self._unit} {READY}", 1)
            self._store.add("door", 1)

    def _forget(self, number: int) -> None:
        unit, words = self._known.pop(number, None), [CLAIMED, READY, LEFT, REFUSED]
        if unit is not None:
            words += [f"rank {each}" for each in range(unit.size)]
            self._litter[-1] += [f"latest {unit.name}", *[f"{LAST_MEETING}/rank {rank}" for rank in unit.ranks]]
        self._litter[-1] += [f"unit {number}", *[f"unit {number} {word}" for word in words]]

    def fail(self, why: str) -> None:
        """On rank 0: tell all others, which wait for the next epoch, that there is none."""
        self._epoch += 1
        self._write(None, why)

    def _write(self, units: Any, more: Any) -> None:
        word = json.dumps([units, more])
        seal = "" if self._seal is None else self._seal.of("epoch", str(self._epoch), word)
        self._store.set(f"epoch {self._epoch}", json.dumps([word, seal]))
        self._store.set(LATEST, str(self._epoch))
        self._litter[-1] += [f"epoch {self._epoch}", _tag(self._epoch, word)]
        self._litter.append([])
        if len(self._litter) > KEPT:
            stale = self._litter.popleft()
            # What meetings and groups left, whose ranks died, begins with the tag of their epoch. torch 2.12 and newer.
            known = self._store.list_keys() if hasattr(self._store, "list_keys") else []
            for key in (*stale, *[key for key in known if key.partition("/")[0] in stale]):
                self._store.delete_key(key)

    def _follow(self) -> None:
        """Read the next epoch in which this rank is, and wait for it."""
        until = time.monotonic() + self._timeout.total_seconds()
        while True:
            while not self._store.check([key := f"epoch {self._epoch}"]):
                self._check_refused()
                if time.monotonic() > until:
                    limit = f"{self._timeout.total_seconds():g} s"
                    raise RuntimeError(f"Rank 0 of the fleet didn't say within {limit} who is there: do trainers run?")
                latest = self._last_epoch()
                if latest > self._epoch and not self._store.check([key]):
                    self._epoch = latest  # the other was deleted
                time.sleep(LOOK)
            word, seal = json.loads(self._store.get(key))
            if self._seal is not None and not self._seal.fits(seal, "epoch", str(self._epoch), word):
                raise ValueError("What rank 0 of the fleet says isn't signed with this rank's key.")
            units, more = json.loads(word)
            if units is None:
                raise RuntimeError(f"The trainers of this fleet failed: {more}")
            before, self.units = self.units, tuple([Unit(*unit) for unit in units])
            self.tag = _tag(self._epoch, word)
            self.joined += [unit for unit in self.units if unit not in before]
            self.gone += [Gone(name, tuple(ranks), why) for name, ranks, why in more]
            if not self._unit or self._unit in [unit.number for unit in self.units]:
                return
            if any(unit.number == self._unit for unit in before):
                raise Dropped("This server was dropped by the trainers: it died, or was too slow. Join again.")
            self._epoch += 1  # the trainers changed for another unit; this one is taken in later

    def _last_epoch(self) -> int:
        return int(self._store.get(LATEST)) if self._store.check([LATEST]) else 0

    def refuse(self, number: int, why: str) -> None:
        """Leave out a unit of the present epoch that doesn't fit. All ranks find so by themselves."""
        (unit,) = [unit for unit in self.units if unit.number == number]
        self.units = tuple([each for each in self.units if each.number != number])
        self.joined = [each for each in self.joined if each.number != number]
        self.gone.append(Gone(unit.name, tuple(unit.ranks), why))
        self._forget(number)

    def lost_with(self, gone: Sequence[int], why: str) -> dict[int, str]:
        """Return the units that a failure has cost, by number, each with why. Rank 0 waits a little for one that
        says that it leaves."""
        lost = {unit.number: why for unit in self.units_of(gone)}
        until = time.monotonic() + 1.0
        while not lost and time.monotonic() < until:
            for unit in self.units:
                if self._store.check([f"unit {unit.number} {LEFT}"]):
                    lost[unit.number] = "it left"
            time.sleep(LOOK)
        return lost

    # --- Coming and leaving ---

    def _read_unit(self, number: int) -> tuple[Unit | None, str]:
        word, seal = json.loads(self._store.get(f"unit {number}"))
        if self._seal is None:
            return Unit(*json.loads(word)), "it has a key, and the trainers have none" if seal else ""
        if not self._seal.fits(seal, "unit", str(number), word):
            return None, "it hasn't the key that the trainers have"
        return Unit(*json.loads(word)), ""

    def _check_refused(self) -> None:
        if self._unit and self._store.check([f"unit {self._unit} {REFUSED}"]):
            raise ValueError(f"This server was refused: {self._store.get(f'unit {self._unit} {REFUSED}').decode()}.")

    def leave(self) -> None:
        """Say that this rank's unit leaves. Does nothing on a trainer, and if it is said, and raises nothing."""
        if self._unit and not self._has_left:
            self._has_left = True
            with contextlib.suppress(RuntimeError, FutureTimeout):
                in_time(self._say_left, LEAVING)

    def _say_left(self) -> None:
        self._store.set(f"unit {self._unit} {LEFT}", "")
        self._store.add("door", 1)

    def join(
        self, name: str, rank: int, size: int, own: Any, wait: Callable[[str], None]
    ) -> tuple[int, dict[int, Any]]:
        """Bring a unit to the door. Collective over its ranks; `rank` is in the unit.

        Args:
            own: what this rank says of itself, as JSON takes it.
            wait: called again and again, with what this rank waits for; raises when it is too late.

        Returns:
            This rank at the place, and what each rank of the unit said, by its rank at the place.
        """
        store, nonce, number = self._store, secrets.token_hex(16), 0
        self._epoch = self._last_epoch()
        if rank == 0:
            number = store.add("units", 1)
            unit = Unit(number, name, self.trainers + store.add("numbers", size) - size, size, nonce)
            word = json.dumps([*unit])
            seal = "" if self._seal is None else self._seal.of("unit", str(number), word)
            store.set(f"unit {number}", json.dumps([word, seal]))
            store.set(f"unit {number} rank 0", json.dumps([nonce, own]))
            store.set(f"latest {name}", str(number))
        while True:
            if rank == 0:
                store.compare_set(f"latest {name}", "", str(number))  # it may have been deleted, as a former self's
            elif store.check([f"latest {name}"]):
                latest = int(store.get(f"latest {name}"))
                # One that is complete is a former self. One of which a rank was killed on its way is left for the
                # newest.
                if latest != number and not store.check([f"unit {latest} {CLAIMED}"]):
                    claimed = store.compare_set(f"unit {latest} rank {rank}", "", json.dumps([nonce, own]))
                    if json.loads(claimed)[0] == nonce:
                        number = latest
            keys = [f"unit {number} rank {each}" for each in range(size)]
            if number and store.check(keys):
                break
            missing = [each for each, key in enumerate(keys) if not number or not store.check([key])]
            wait(f"{of_ranks(missing)} of the server {name!r}")
            time.sleep(LOOK)
        if rank == 0:
            store.set(f"unit {number} {CLAIMED}", "")
            store.add("door", 1)
        unit = Unit(*json.loads(json.loads(store.get(f"unit {number}"))[0]))
        self._unit, self._rank = number, unit.first + rank
        said = {unit.first + each: json.loads(store.get(key))[1] for each, key in enumerate(keys)}
        return self._rank, said


def _tag(epoch: int, word: str) -> str:
    return hashlib.sha256(f"{epoch} {word}".encode()).hexdigest()[:16]
