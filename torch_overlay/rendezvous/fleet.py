"""`Fleet`: the servers that come to an open place, and go. Start at `Fleet.change`.

A unit is a server: its ranks come and go together. Each change makes a new epoch: rank 0 writes into the store which
units there are, and all others read it. Meetings and groups of one epoch have names of their own, so that nobody waits
in those of another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, NamedTuple

from ..distributed._mesh.text import of_ranks
from .watch import in_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import timedelta

    from torch.distributed import Store

    from .seal import Seal

LEAVING = 2.0  # seconds that a store gets to hear that a server leaves
LOOK = 0.05  # seconds between two looks at the store
CLAIMED = "claimed"  # a unit all of whose ranks are there


class Unit(NamedTuple):
    """A server: ranks that come and go together.

    Attributes:
        number: the how manieth one came, from 1.
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
        rank: this one; rank 0 decides.
        timeout: for how long a rank waits for rank 0.

    Attributes:
        trainers: as given.
        units: those that are there.
        tag: of the present epoch, in the names of its meetings and groups.
        joined, gone: since the last call of `begin`.
        is_used: whether there is a Transfer. A second one would miss who came for the first.
    """

    def __init__(self, store: Store, seal: Seal | None, trainers: int, rank: int, timeout: timedelta) -> None:
        self._store, self._seal, self._timeout = store, seal, timeout
        self._unit = 0  # the number of this rank's unit; 0 on a trainer
        self.trainers, self._rank = trainers, rank
        self.units: tuple[Unit, ...] = ()
        self.joined: list[Unit] = []
        self.gone: list[Gone] = []
        self._epoch, self._door, self.tag = 0, -1, ""
        self._dropped: dict[int, str] = {}
        self.is_used = self._has_left = False

    @property
    def ranks(self) -> list[int]:
        """The ranks of the trainers and of all units that are there."""
        return [*range(self.trainers), *[rank for unit in self.units for rank in unit.ranks]]

    def begin(self) -> None:
        """Forget who came and went before."""
        self.joined, self.gone = [], []

    def is_news(self) -> bool:
        """On rank 0: True if somebody came or left since it decided last. One request."""
        return self._rank == 0 and self._store.add("door", 0) != self._door

    def units_of(self, ranks: Iterable[int]) -> list[Unit]:
        """Return the units that have some of these ranks."""
        some = {*ranks}
        return [unit for unit in self.units if not some.isdisjoint(unit.ranks)]

    # --- Who is there ---

    def change(self, lost: Mapping[int, str]) -> None:
        """Begin the next epoch: without the units with the numbers `lost`, whose values say why, and with those at the
        door. All ranks of the place that are left call it."""
        self._epoch += 1
        if self._rank == 0:
            self._decide(lost)
        self._follow()

    def _decide(self, lost: Mapping[int, str]) -> None:
        door = self._store.add("door", 0)
        self._dropped |= lost
        newest: dict[str, Unit] = {}
        for number in range(1, self._store.add("units", 0) + 1):
            if number in self._dropped or not self._store.check([f"unit {number} {CLAIMED}"]):
                continue
            unit, problem = self._read_unit(number)
            if self._store.check([f"unit {number} left"]):
                self._dropped[number] = "it left"
            elif problem or unit is None:
                self._dropped[number] = problem
                self._store.set(f"unit {number} refused", problem)
            else:
                if unit.name in newest:
                    self._dropped[newest[unit.name].number] = "a server of its name came"
                newest[unit.name] = unit
        gone = [
            [unit.name, [*unit.ranks], self._dropped[unit.number]]
            for unit in self.units
            if unit.number in self._dropped
        ]
        self._door = door
        self._write([[*unit] for unit in newest.values()], gone)

    def fail(self, why: str) -> None:
        """On rank 0: tell all others, which wait for the next epoch, that there is none."""
        self._epoch += 1
        self._write(None, why)

    def _write(self, units: Any, more: Any) -> None:
        word = json.dumps([units, more])
        seal = "" if self._seal is None else self._seal.of("epoch", str(self._epoch), word)
        self._store.set(f"epoch {self._epoch}", json.dumps([word, seal]))

    def _follow(self) -> None:
        """Read the next epoch, and wait for it."""
        key, until = f"epoch {self._epoch}", time.monotonic() + self._timeout.total_seconds()
        while not self._store.check([key]):
            self._check_refused()
            if time.monotonic() > until:
                limit = f"{self._timeout.total_seconds():g} s"
                raise RuntimeError(f"Rank 0 of the fleet didn't say within {limit} who is there: do trainers run?")
            time.sleep(LOOK)
        word, seal = json.loads(self._store.get(key))
        if self._seal is not None and not self._seal.fits(seal, "epoch", str(self._epoch), word):
            raise ValueError("What rank 0 of the fleet says isn't signed with this rank's key.")
        units, more = json.loads(word)
        if units is None:
            raise RuntimeError(f"The trainers of this fleet failed: {more}")
        before, self.units = self.units, tuple([Unit(*unit) for unit in units])
        self.tag = hashlib.sha256(f"{self._epoch} {word}".encode()).hexdigest()[:16]
        self.joined += [unit for unit in self.units if unit not in before]
        self.gone += [Gone(name, tuple(ranks), why) for name, ranks, why in more]
        if self._unit and self._unit not in [unit.number for unit in self.units]:
            if any(unit.number == self._unit for unit in before):
                raise Dropped("This server was dropped by the trainers: it died, or was too slow. Join again.")
            self._epoch += 1  # the trainers changed for another unit; this one is taken in later
            self._follow()

    def belongs_to(self, unit: Unit, rank: int) -> None:
        """This rank is one of a unit."""
        self._unit, self._rank = unit.number, rank

    def catch_up(self) -> None:
        """Before a unit comes: begin with the epoch that is being written next."""
        while self._store.check([f"epoch {self._epoch + 1}"]):
            self._epoch += 1

    def refuse(self, number: int, why: str) -> None:
        """Leave out a unit of the present epoch that doesn't fit. All ranks find so by themselves."""
        (unit,) = [unit for unit in self.units if unit.number == number]
        self.units = tuple([each for each in self.units if each.number != number])
        self.joined = [each for each in self.joined if each.number != number]
        self.gone.append(Gone(unit.name, tuple(unit.ranks), why))
        self._dropped[number] = why

    def lost_with(self, gone: Sequence[int], why: str) -> dict[int, str] | None:
        """Return the units that a failure has cost, by number, each with why; None if it was no unit's. On rank 0 waits
        a little for a unit that says that it leaves."""
        lost = {unit.number: why for unit in self.units_of(gone)}
        until = time.monotonic() + 1.0
        while not lost and time.monotonic() < until:
            for unit in self.units:
                if self._store.check([f"unit {unit.number} left"]):
                    lost[unit.number] = "it left"
            time.sleep(LOOK)
        return lost or None

    # --- Coming and leaving ---

    def _read_unit(self, number: int) -> tuple[Unit | None, str]:
        word, seal = json.loads(self._store.get(f"unit {number}"))
        if self._seal is None:
            return Unit(*json.loads(word)), "it has a key, and the trainers have none" if seal else ""
        if not self._seal.fits(seal, "unit", str(number), word):
            return None, "it hasn't the key that the trainers have"
        return Unit(*json.loads(word)), ""

    def _check_refused(self) -> None:
        if self._unit and self._store.check([f"unit {self._unit} refused"]):
            raise ValueError(f"This server was refused: {self._store.get(f'unit {self._unit} refused').decode()}.")

    def leave(self) -> None:
        """Say that this rank's unit leaves. Does nothing on a trainer, and if it is said, and raises nothing."""
        if self._unit and not self._has_left:
            self._has_left = True
            with contextlib.suppress(RuntimeError, FutureTimeout):
                in_time(self._say_left, LEAVING)

    def _say_left(self) -> None:
        self._store.set(f"unit {self._unit} left", "")
        self._store.add("door", 1)


def register(
    store: Store,
    seal: Seal | None,
    name: str,
    rank: int,
    size: int,
    trainers: int,
    nonce: str,
    own: Any,
    wait: Callable[[str], None],
) -> tuple[Unit, dict[int, Any]]:
    """Bring a unit to the door. Collective over its ranks.

    Args:
        rank: in the unit.
        own: what this rank says of itself, as JSON takes it.
        wait: called again and again, with what this rank waits for; raises when it is too late.

    Returns:
        The unit, and what each of its ranks said, by rank in the unit.
    """
    number = 0
    if rank == 0:
        number = store.add("units", 1)
        unit = Unit(number, name, trainers + store.add("numbers", size) - size, size, nonce)
        word = json.dumps([*unit])
        store.set(f"unit {number}", json.dumps([word, "" if seal is None else seal.of("unit", str(number), word)]))
        store.set(f"latest {name}", str(number))
    while True:
        if rank and store.check([f"latest {name}"]):
            latest = int(store.get(f"latest {name}"))
            # One that is complete is a former self. One of which a rank was killed on its way is left for the newest.
            if latest != number and not store.check([f"unit {latest} {CLAIMED}"]):
                claimed = store.compare_set(f"unit {latest} rank {rank}", "", json.dumps([nonce, own]))
                if json.loads(claimed)[0] == nonce:
                    number = latest
        if rank == 0 and not store.check([f"unit {number} rank 0"]):
            store.set(f"unit {number} rank 0", json.dumps([nonce, own]))
        keys = [f"unit {number} rank {each}" for each in range(size)]
        if number and store.check(keys):
            break
        missing = [each for each, key in enumerate(keys) if not number or not store.check([key])]
        wait(f"{of_ranks(missing)} of the server {name!r}")
        time.sleep(LOOK)
    if rank == 0:
        store.set(f"unit {number} {CLAIMED}", "")
        store.add("door", 1)
    word, _ = json.loads(store.get(f"unit {number}"))
    return Unit(*json.loads(word)), {each: json.loads(store.get(key))[1] for each, key in enumerate(keys)}
