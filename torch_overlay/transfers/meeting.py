"""How the ranks of a transfer come together and tell one another something; whoever is missing is named.

A `Meeting` goes by the group's store and not by a collective: a collective that lacks a rank only says that some time
has passed. A `Place` is where processes of several torch.distributed worlds, or of none, meet and are numbered anew
(`torch_overlay.meet`); what they say there is signed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, TCPStore, distributed_c10d

from ..distributed._mesh.text import of_ranks, ranks_text
from .team import DESCRIPTION, Common, Team, timeout_of
from .watch import in_time

if TYPE_CHECKING:
    from torch.distributed import Store


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
    name = f"torch_overlay/{name}/{held[name]}"
    return Meeting(name, ranks, dist.get_rank(), distributed_c10d._get_default_store(), timeout, purpose)


class Meeting:
    """One meeting of some ranks; they hold their meetings in the same order.

    Args:
        name: of this meeting alone, the same on all ranks: what its keys in the store begin with.
        store: of all ranks.
        seal: signs what is said; None where who reaches the store is trusted.
        hint: what to do if a rank doesn't come.
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


logger = logging.getLogger(__name__)

KEY = "TORCH_OVERLAY_MEET_KEY"
AGAIN = 0.2  # seconds between two tries to come in
LEAVING = 5.0  # seconds that rank 0 waits for the others to leave
_open: weakref.WeakSet[Place] = weakref.WeakSet()  # of this process
_inherited: list[object] = []  # stores of the parent, which a forked child must neither use nor destroy


class Seal:
    """Signs what a rank says, so that who doesn't know the key can't say it, nor say again what was said elsewhere.

    Args:
        key: known to all ranks, and sent by none.
        session: what all of them made up together for this meeting.
    """

    def __init__(self, key: bytes, session: str) -> None:
        self._key, self._session = key, session

    def within(self, meeting: str) -> Seal:
        """For one meeting of this session."""
        return Seal(self._key, f"{self._session} {meeting}")

    def of(self, *words: str) -> str:
        """The signature of words."""
        return hmac.new(self._key, "\0".join((self._session, *words)).encode(), hashlib.sha256).hexdigest()

    def fits(self, seal: str, *words: str) -> bool:
        """Whether it is theirs."""
        return hmac.compare_digest(seal, self.of(*words))


class Place:
    """What `torch_overlay.meet` gives: give it to a `Transfer` as `group`.

    Attributes:
        rank: of this process here.
        size: how many there are.
        timeout: how long its ranks wait for one another.
        numbers: for each rank of this process's own world that met here, its rank here. Of the world that was there
            then: a world that is opened later may have other ranks on the same processes.
    """

    def __init__(self, address: str, rank: int, world_size: int, key: str | bytes | None, timeout: float) -> None:
        host, port = _read(address)
        if not 0 <= rank < world_size:
            raise ValueError(f"meet() needs a rank from 0 to {world_size - 1}, world_size - 1; got {rank}.")
        key = os.environ.get(KEY) if key is None else key
        if key is not None and not key:
            raise ValueError(f"meet() needs a key that isn't empty, or none: by key=, or by {KEY}.")
        self.rank, self.size, self.timeout = rank, world_size, timedelta(seconds=timeout)
        self._common: Common | None = None
        self._address, self._held, self._teams = address, Counter[str](), Counter[str]()
        self._purpose = f"A meeting of {world_size} at {address}"
        self._store: Any = None
        self._server = self._listens_at = None
        if rank == 0:
            self._server, self._listens_at = _listening(host, port, self.timeout, self._purpose)
            # By rank 0 alone: whoever came first with another size would decide for all.
            self._server.set("size", str(world_size))
        _open.add(self)
        nonce = secrets.token_hex(16)
        self._seal = None
        self._world = _default_group()
        try:
            self._store = _come_in(self, host, port, nonce, self._purpose)
            nonces = self.meeting(self._purpose).say(nonce)
            if nonces[rank] != nonce:
                raise ValueError(f"{self._purpose}: somebody else spoke as rank {rank}.")
            if key is not None:
                # What all of them made up together, each anew, so that nothing said before fits.
                self._seal = Seal(key.encode() if isinstance(key, str) else key, str(sorted(nonces.items())))
            worlds = self.meeting(self._purpose).say(_world())
        except Exception:
            self.close()
            raise
        token = worlds[rank][0]
        here = [(own, other) for other, (its, own) in worlds.items() if its == token is not None]
        self.numbers = dict(here)

    def meeting(self, purpose: str, ranks: Sequence[int] | None = None, hint: str = "") -> Meeting:
        """The next meeting of these ranks, or of all. The hint says what to do if one doesn't come."""
        if self._store is None:
            raise RuntimeError(f"The place at {self._address} is closed. Meet again.")
        some = sorted(range(self.size) if ranks is None else ranks)
        name = hashlib.sha256(repr(some).encode()).hexdigest()
        self._held[name] += 1
        if purpose == self._purpose:
            hint = "Each process calls meet() with a rank of its own."
        seal = None if self._seal is None else self._seal.within(f"{name}/{self._held[name]}")
        name = f"meeting/{name}/{self._held[name]}"
        return Meeting(name, some, self.rank, self._store, self.timeout, purpose, seal, hint, keeper=0)

    def team(self, ranks: Sequence[int], device: str) -> Team | None:
        """These ranks with a group of their own; None on a rank outside. Collective over them.

        Raises:
            ValueError: no backend of torch's own is for this type of device.
        """
        if self.rank not in ranks:
            return None
        name = hashlib.sha256(repr([*ranks]).encode()).hexdigest()[:16]
        self._teams[name] += 1
        name = f"torch_overlay_place/{name}/{self._teams[name]}"
        return Team(self.new_group(ranks, device, name), ranks, self.rank, torch.device(device), name)

    def new_group(self, ranks: Sequence[int], device: str, name: str) -> ProcessGroup:
        """A group of these ranks by this name, for a type of device. Raises as `team`."""
        store = PrefixStore(name, self._store)
        own, size = [*ranks].index(self.rank), len(ranks)
        if device == "cpu":
            kind = ProcessGroup.BackendType.GLOO
            backend: Any = dist.ProcessGroupGloo(store, own, size, timeout=self.timeout)
        elif device == "cuda" and hasattr(dist, "ProcessGroupNCCL"):
            kind = ProcessGroup.BackendType.NCCL
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            backend = dist.ProcessGroupNCCL(store, own, size, options)
        else:
            raise ValueError(f"Ranks of a place exchange by gloo on the CPU or by NCCL; got tensors on {device!r}.")
        group = ProcessGroup(store, own, size)
        group._set_default_backend(kind)
        backend._set_sequence_number_for_group()
        group._register_backend(torch.device(device), kind, backend)
        group._set_group_name(name)
        group._set_group_desc(DESCRIPTION)
        logger.debug("made %s, the process group %r of ranks %s of the place", DESCRIPTION, name, ranks)
        return group

    @property
    def common(self) -> Common:
        """What the transfers of this place have in common."""
        if self._common is None:
            self._common = Common(self._store)
        return self._common

    def of_world(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Ranks of this process's own world, as they are numbered here.

        Raises:
            ValueError: some didn't meet here, or the world isn't the one that was there when this process met.
        """
        # Trainers that closed their world and opened it with ranks 0 and 1 swapped once sent each other's values: the
        # numbers of this place were those of the world before.
        if self._world is None or self._world() is not _default_group_itself():
            had = "before init_process_group" if self._world is None else "in another torch.distributed world"
            raise ValueError(
                f"the place at {self._address} knows no ranks of this world, and a mesh has them: this process met "
                f"{had}. Close the place, and let all meet again, after init_process_group"
            )
        missing = [rank for rank in ranks if rank not in self.numbers]
        if missing:
            raise ValueError(
                f"{of_ranks(missing)} of its world didn't meet at {self._address}, and a mesh has them. All ranks of a "
                "mesh meet"
            )
        return tuple([self.numbers[rank] for rank in ranks])

    def close(self) -> None:
        """Leave. Rank 0 ends the place for all, when they left or after a few seconds, and its port is free then. Again
        does nothing."""
        _open.discard(self)
        store, self._store, self._common = self._store, None, None
        if store is None:
            self._server = None
            return

        def leave() -> None:
            if self.rank == 0:
                store.set("closed", "")
            store.set(f"left {self.rank}", "")
            if self.rank == 0:
                came = [rank for rank in range(self.size) if store.check([f"came {rank}"])]
                store.wait([f"left {rank}" for rank in came], timedelta(seconds=LEAVING))

        try:
            in_time(leave, 2 * LEAVING)
        except (RuntimeError, FutureTimeout):
            pass  # rank 0 is gone, or somebody stays
        self._server = None

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.size} at {self._address}>"


def _read(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port or parts.path:
        raise ValueError(f"meet() needs an address where rank 0 listens, as tcp://trainer-0:29600; got {address!r}.")
    return parts.hostname, parts.port


def _listening(host: str, port: int, timeout: timedelta, purpose: str) -> tuple[TCPStore, tuple[Any, ...]]:
    """The store of a place, which lives as long as this, and the address to which its socket is bound."""
    try:
        family, _, _, _, at = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise RuntimeError(
            f"{purpose}: rank 0 can't listen there: {_unknown(host, error)} Give the name or the address of rank 0's "
            "own host, as the others reach it."
        ) from error
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(at)  # torch's own would listen on each address of this machine
        listening.listen()
        at = listening.getsockname()
    except OSError as error:
        listening.close()
        raise RuntimeError(f"{purpose}: rank 0 can't listen there: {error}. Is another place open there?") from error
    # It closes the socket.
    return TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()), at


def _unknown(host: str, error: socket.gaierror) -> str:
    return f"the host name {host!r} can't be resolved here ({error.strerror})."


def _come_in(place: Place, host: str, port: int, nonce: str, purpose: str) -> TCPStore:
    """The store of rank 0, which may come later, or be about to close the place that was here before.

    Raises:
        RuntimeError: rank 0 didn't come in time, or somebody else is there, or nobody knows the host.
        ValueError: the place has another process of this rank, which stays, or another size.
    """
    until, limit = time.monotonic() + place.timeout.total_seconds(), f"{place.timeout.total_seconds():g} s"
    problem: Exception | None = None
    while True:
        try:
            # By a plain socket first, since torch's waits aloud.
            socket.create_connection((host, port), timeout=5 * AGAIN).close()
            store = _client(host, port, place.timeout, until)
            if store is None:
                socket.create_connection((host, port), timeout=5 * AGAIN).close()  # or it left meanwhile
                raise _Stranger(f"{purpose}: who listens there didn't answer as rank 0 does, within {limit}.")
            if not store.check(["closed"]):
                store.wait(["size"], timedelta(seconds=5 * AGAIN))
                size = int(store.get("size"))
                if size != place.size:
                    # Not at once: a place that is about to be closed had another size, if the job grew.
                    problem = ValueError(
                        f"{purpose}: others give world_size {size}. All give the same one. If theirs is a place of "
                        f"before, it closes first, and it didn't within {limit}."
                    )
                elif store.compare_set(f"came {place.rank}", "", nonce).decode() == nonce:
                    return store
                else:
                    problem = ValueError(
                        f"{purpose} has a rank {place.rank} already, and it didn't leave within {limit}. Each process "
                        "has a rank of its own; after a restart rank 0 closes the place, and all meet again."
                    )
        except _Stranger:
            raise
        except socket.gaierror as error:
            # Not at once: a cluster may learn the name when rank 0's host is up.
            if not isinstance(problem, _UnknownHost):
                logger.warning("%s: %s Trying for %s.", purpose, _unknown(host, error), limit)
            problem = _UnknownHost(
                f"{purpose}: {_unknown(host, error)} Tried for {limit}. Give the name or the address of rank 0's host, "
                "as this host knows it."
            )
            problem.__cause__ = error
        except (OSError, RuntimeError) as error:
            if not isinstance(problem, ValueError):
                problem = RuntimeError(f"{purpose}: nobody listened there within {limit}. Is rank 0 there?")
                problem.__cause__ = error
        if time.monotonic() > until and problem is not None:
            raise problem
        time.sleep(AGAIN)


class _UnknownHost(RuntimeError):
    """The name of rank 0's host can't be resolved."""


def refuse_transfer(place: Place, why: str) -> None:
    """Take part in making a `Transfer` over a place by saying that this rank can't: all others raise a ValueError with
    these words at once, and wait for nobody. Collective over the place."""
    from .descriptions import Description, as_data

    place.meeting("A Transfer").say(as_data(Description({}, {}, why)))


class _Stranger(RuntimeError):
    """Somebody listens at the address, and it isn't rank 0."""


def _client(host: str, port: int, timeout: timedelta, until: float) -> TCPStore | None:
    """A store of who listens there; None if that doesn't answer: torch's own waits for it without a limit."""
    try:
        return in_time(
            lambda: TCPStore(host, port, None, False, timeout, wait_for_workers=False),
            max(until - time.monotonic(), AGAIN),
        )
    except FutureTimeout:
        return None


def _world() -> tuple[str | None, int]:
    """A token that the ranks of a world share, and this rank in it; None in no world."""
    if not dist.is_initialized():
        return None, -1
    store = distributed_c10d._get_default_store()
    token = store.compare_set("torch_overlay/world", "", secrets.token_hex(16)).decode()
    return token, dist.get_rank()


def _default_group_itself() -> ProcessGroup | None:
    return distributed_c10d._get_default_group() if dist.is_initialized() else None


def _default_group() -> weakref.ref[ProcessGroup] | None:
    """The world of now, by its default group: another world has another one, also over the same store, whose token
    stays."""
    group = _default_group_itself()
    return None if group is None else weakref.ref(group)


def _leave_to_parent() -> None:
    """In a forked child: its parent's places are closed here, and open there.

    A child (a data loader's worker, say) has copies of all sockets. While it lives, its dead parent's port is taken,
    and the others get no word that rank 0 died, since its connections stay open. Each such descriptor leads to nothing
    from now on, and isn't closed: torch's objects still have its number, and would close whatever has it then.
    """
    for place in list(_open):
        _open.discard(place)
        if place._listens_at is not None:
            _disconnect(place._listens_at)
        _inherited.extend((place._store, place._server))
        place._store = place._server = None


def _disconnect(at: tuple[Any, ...]) -> None:
    """Lead each descriptor of a socket that is bound or connected to this address to nothing."""
    try:
        numbers = [int(name) for name in os.listdir("/dev/fd")]
        nothing = os.open(os.devnull, os.O_RDWR)
    except OSError:
        return  # no such folder here: as it was
    for number in numbers:
        try:
            with socket.socket(fileno=os.dup(number)) as one:
                ends = [one.getsockname()]
                if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ends.append(one.getpeername())
        except OSError:
            continue  # no socket, or one that isn't connected
        if any(isinstance(end, tuple) and end[:2] == at[:2] for end in ends):
            os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
