"""`Place`: where processes of several torch.distributed worlds, or of none, meet and get new ranks
(`torch_overlay.meet`, `join`). With a key, what they say there is signed."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import secrets
import socket
import time
import weakref
from collections import Counter
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, TCPStore, distributed_c10d

from ..distributed._mesh.text import of_ranks
from . import long_waits
from .blocking import in_time
from .fleet import Fleet
from .long_waits import LAST_MEETING
from .meeting import Meeting
from .seal import Seal
from .team import DESCRIPTION, Common, Team

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger(__name__)

KEY = "TORCH_OVERLAY_MEET_KEY"  # the environment variable that may have the key
AGAIN = 0.2  # seconds between two tries to connect
LEAVING = 5.0  # seconds that rank 0 waits for the others to leave
_open: weakref.WeakSet[Place] = weakref.WeakSet()  # the places of this process that aren't closed
_joins: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()  # by world, how often its ranks agreed on a name
_inherited: list[object] = []  # stores of the parent, which a forked child must neither use nor destroy


class Place:
    """A place where processes of several worlds have met, as `torch_overlay.meet` returns it. See there for arguments.

    Give it to a `Transfer` as `group`.

    Attributes:
        rank: of this process at this place.
        size: how many processes met.
        timeout: how long ranks wait for one another, as a timedelta.
        numbers: for each rank of this process's own world that met here, its rank at this place. They belong to the
            world that existed then: one that is opened later may have other ranks on the same processes.

    Raises:
        ValueError: the address, the rank or the key is wrong, or doesn't fit those of other processes.
        RuntimeError: a process didn't come within the timeout.
    """

    fleet: Fleet | None = None  # at an open place
    _purpose = ""
    _store: Any = None
    _server: TCPStore | None = None
    _listens_at: tuple[Any, ...] | None = None
    _seal: Seal | None = None

    def __init__(
        self,
        address: str,
        rank: int,
        world_size: int,
        key: str | bytes | None,
        timeout: timedelta,
        is_open: bool = False,
    ) -> None:
        host, port = self._begin("meet", address, rank, world_size, key, timeout)
        key = self._key
        if is_open and key is None and not _is_loopback(host):
            raise ValueError(
                f"meet(open=True) at {address}, which other hosts reach, needs a key: by key=, or by {KEY}. Else "
                "whoever reaches the port could join, and be sent the weights."
            )
        self._purpose = f"A meeting of {world_size} at {address}"
        if rank == 0:
            self._server, self._listens_at = _listening(host, port, self.timeout, self._purpose)
            # By rank 0 alone. If every process could set it, the first to come with a wrong size would decide.
            self._server.set("size", str(world_size))
        nonce = secrets.token_hex(16)
        try:
            self._store = _come_in(self, host, port, self._claim(nonce), self._purpose)
            nonces = self.meeting(self._purpose).say(nonce)
            if nonces[rank] != nonce:
                raise ValueError(f"{self._purpose}: somebody else spoke as rank {rank}.")
            if key is not None:
                # Of the random numbers of all ranks, so that nothing that was said before has a valid signature.
                self._seal = Seal(key, str(sorted(nonces.items())))
            worlds = self.meeting(self._purpose).say([*_world(), is_open])
            if {is_open} != {other for _, _, other in worlds.values()}:
                raise ValueError(f"{self._purpose}: all give the same open=, and some gave another one.")
            if is_open:
                self.fleet = Fleet(self._store, self._seal, world_size, rank, timeout)
                if rank == 0:
                    self._store.set("session", str(sorted(nonces.items())))
        except Exception:
            self.close()
            raise
        except BaseException:  # Ctrl-C: nobody leaves because this rank does
            self._close(0)
            raise
        self.numbers = _numbers_of(worlds, rank)

    def _begin(
        self, called: str, address: str, rank: int, world_size: int, key: str | bytes | None, timeout: timedelta
    ) -> tuple[str, int]:
        """Check the arguments of `meet` or `join`, and set what doesn't take others. Returns the host and the port."""
        host, port = _read(address, called)
        if not (all(hasattr(each, "__index__") for each in (rank, world_size)) and 0 <= rank < world_size):
            raise ValueError(
                f"{called}() needs whole numbers, a rank from 0 to world_size - 1; got {rank!r} of {world_size!r}."
            )
        key = os.environ.get(KEY) if key is None else key
        if key is not None and not key:
            raise ValueError(f"{called}() needs a key that isn't empty, or none: by key=, or by {KEY}.")
        self._key = key.encode() if isinstance(key, str) else key
        self.rank, self.size, self.timeout = rank, world_size, timeout
        self._common: Common | None = None
        # How many meetings, and how many teams, each list of ranks has had. It makes the name of the next one.
        self._address, self._meetings, self._teams = address, Counter[str](), Counter[str]()
        self._world = _default_group()
        _open.add(self)
        return host, port

    @classmethod
    def joined(
        cls,
        address: str,
        name: str | None,
        rank: int,
        world_size: int,
        key: str | bytes | None,
        timeout: timedelta,
    ) -> Place:
        """Come to an open place as a rank of a server, as `torch_overlay.join` does. See there for arguments."""
        place = cls.__new__(cls)
        host, port = place._begin("join", address, rank, world_size, key, timeout)
        name = _name_of_unit(world_size) if name is None else name
        place._purpose = f"Joining {address} as rank {rank} of the server {name!r}"
        begun, seconds = time.monotonic(), timeout.total_seconds()

        def wait(missing: str) -> None:
            if time.monotonic() - begun > seconds:
                raise RuntimeError(f"{place._purpose}: {missing} didn't come within {seconds:g} s.")

        try:
            place._store = _come_in(place, host, port, _is_open, place._purpose)
            if place._key is not None:
                place._seal = Seal(place._key, place._store.get("session").decode())
            trainers = int(place._store.get("size"))
            fleet = Fleet(place._store, place._seal, trainers, None, timeout)
            place.rank, worlds = fleet.join(name, rank, world_size, _world(), wait)
            place.numbers = _numbers_of(worlds, place.rank)
            place.fleet = fleet
        except BaseException:
            place._store = None  # in which rank 0 of a server, as if of the place, would say that this is closed
            place._close(0)
            raise
        return place

    def _claim(self, nonce: str) -> Callable[[TCPStore], tuple[str, Exception] | None]:
        """Return what claims this process's rank at the place of a store, and says why it can't."""

        def claim(store: TCPStore) -> tuple[str, Exception] | None:
            store.wait(["size"], timedelta(seconds=5 * AGAIN))
            size, limit = int(store.get("size")), f"{self.timeout.total_seconds():g} s"
            if size != self.size:
                # Not raised at once: if the job was started again with more processes, this may be the old place, which
                # is about to be closed. The last meeting is for rank 0, which waits for this one.
                other_size = f"the same address with world_size {self.size}"
                PrefixStore(LAST_MEETING, store).set(f"rank {self.rank}", other_size)
                return f"it gives world_size {size}", ValueError(
                    f"{self._purpose}: others give world_size {size}. All give the same one. If theirs is a place of "
                    f"before, it closes first, and it didn't within {limit}."
                )
            if store.compare_set(f"came {self.rank}", "", nonce).decode() == nonce:
                return None
            return f"there is another rank {self.rank}", ValueError(
                f"{self._purpose} has a rank {self.rank} already, and it didn't leave within {limit}. Each process "
                "has a rank of its own; after a restart rank 0 closes the place, and all meet again."
            )

        return claim

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that make a Transfer; at an open place those that are there."""
        return range(self.size) if self.fleet is None else self.fleet.ranks

    def meeting(self, purpose: str, ranks: Sequence[int] | None = None, hint: str = "") -> Meeting:
        """Return the next meeting of some ranks of this place. All of them have to call this in one order, since
        meetings are counted.

        Args:
            purpose: begins the errors.
            ranks: None is all ranks.
            hint: ends the error about a rank that doesn't come.

        Raises:
            RuntimeError: the place is closed.
        """
        if self._store is None:
            raise RuntimeError(f"The place at {self._address} is closed. Meet again.")
        some = sorted(self.ranks if ranks is None else ranks)
        name = f"{self._epoch}meeting/{hashlib.sha256(repr(some).encode()).hexdigest()}"
        self._meetings[name] += 1
        if purpose == self._purpose:
            hint = "Each process calls meet() with a rank of its own."
        seal = None if self._seal is None else self._seal.within(f"{name}/{self._meetings[name]}")
        name = f"{name}/{self._meetings[name]}"
        return Meeting(name, some, self.rank, self._store, self.timeout, purpose, seal, hint, keeper=0)

    @property
    def _epoch(self) -> str:
        return "" if self.fleet is None or not self.fleet.tag else f"{self.fleet.tag}/"

    def forget_epochs(self) -> None:
        """Forget the meetings and groups of former epochs, whose names nobody uses any more."""
        self._meetings.clear()
        self._teams.clear()
        self.common.control_groups.clear()
        self.common.prefix = self._epoch

    def team(self, ranks: Sequence[int], device: str) -> Team | None:
        """Make a group over some ranks of this place, and return this rank's team. Collective over them.

        Args:
            device: the device type of the tensors.

        Returns:
            The team; None on a rank outside.

        Raises:
            ValueError: the device type is neither "cpu" nor "cuda", or torch has no NCCL.
        """
        if self.rank not in ranks:
            return None
        name = f"{self._epoch}torch_overlay_place/{hashlib.sha256(repr([*ranks]).encode()).hexdigest()[:16]}"
        self._teams[name] += 1
        name = f"{name}/{self._teams[name]}"
        return Team(self.new_group(ranks, device, name), ranks, self.rank, torch.device(device), name)

    def new_group(self, ranks: Sequence[int], device: str, name: str) -> ProcessGroup:
        """Make a process group over some ranks of this place, by gloo on the CPU and by NCCL on CUDA. Collective over
        them; this rank is one of them.

        c10d's `new_group` makes groups of one world only. This makes the backend itself, as c10d does inside; so c10d
        doesn't know the group.

        Args:
            device: the device type of the tensors.
            name: of the group, the same on all ranks, and new in each call.

        Raises:
            ValueError: the device type is neither "cpu" nor "cuda", or torch has no NCCL.
        """
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
        """What all transfers of this place share on this rank; made in the first call. Not after `close`."""
        if self._common is None:
            self._common = Common(self._store)
        return self._common

    def of_world(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks at this place of some ranks of this process's own world.

        Raises:
            ValueError: some of them didn't meet here, or the world isn't the one in which this process met.
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
        """Leave the place, and end its store on rank 0. Rank 0 waits up to LEAVING seconds for the others to leave, and
        then frees the port. A second call does nothing. Raises nothing if rank 0 is gone."""
        self._close(LEAVING)

    def _close(self, seconds: float) -> None:
        """Do what `close` says. Rank 0 waits up to `seconds` for the others."""
        _open.discard(self)
        store, self._store, self._common = self._store, None, None
        fleet, self.fleet = self.fleet, None
        if store is None:
            self._server = None
            return

        def leave() -> None:
            """Say in the store that this rank leaves; on rank 0, wait for the others to say so."""
            if fleet is not None:
                fleet.leave()
            if self.rank == 0:
                store.set("closed", "")
            if self.rank < self.size or fleet is None:
                store.set(f"left {self.rank}", "")
            if self.rank == 0 and seconds:
                came = [rank for rank in range(self.size) if store.check([f"came {rank}"])]
                until = time.monotonic() + seconds
                # Not by `store.wait`, of which torch logs two warnings where somebody stays.
                while not store.check([f"left {rank}" for rank in came]) and time.monotonic() < until:
                    time.sleep(AGAIN / 4)

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
        return f"<rank {self.rank} of {len(self.ranks)} at {self._address}>"


def _is_loopback(host: str) -> bool:
    """True if nobody but processes of this host reaches a host of this name."""
    with suppress(OSError):
        return all(ipaddress.ip_address(at[4][0]).is_loopback for at in socket.getaddrinfo(host, None))
    return False


def _is_open(store: TCPStore) -> tuple[str, Exception] | None:
    """Say why nobody can join the place of a store; None if servers can."""
    if store.check(["session"]):
        return None
    return "it isn't open", ValueError("The trainers there didn't give meet(open=True), or haven't all come yet.")


def _numbers_of(worlds: Mapping[int, Sequence[Any]], rank: int) -> dict[int, int]:
    """Return the ranks of a process's own world, each with its rank at the place."""
    own_token = worlds[rank][0]
    return {said[1]: place_rank for place_rank, said in worlds.items() if said[0] == own_token is not None}


def _name_of_unit(world_size: int) -> str:
    """Return a name for a server that gave none: its ranks agree on it by their own world."""
    if world_size == 1:
        return secrets.token_hex(8)
    world = _default_group_itself()
    if world is None or world.size() != world_size:
        raise ValueError(
            f"join() of {world_size} ranks needs name=, the same on all of them: they have no torch.distributed world "
            "of that size by which they could agree on one."
        )
    _joins[world] = _joins.get(world, 0) + 1
    key = f"torch_overlay/join {_joins[world]}"
    return distributed_c10d._get_default_store().compare_set(key, "", secrets.token_hex(8)).decode()


def _read(address: str, called: str = "meet") -> tuple[str, int]:
    """Read an address like tcp://trainer-0:29600."""
    parts = urlsplit(address)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port or parts.path:
        raise ValueError(
            f"{called}() needs an address where rank 0 listens, as tcp://trainer-0:29600; got {address!r}."
        )
    return parts.hostname, parts.port


def _listening(host: str, port: int, timeout: timedelta, purpose: str) -> tuple[TCPStore, tuple[Any, ...]]:
    """Start the store of a place on rank 0."""
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
        listening.bind(at)  # a socket of torch's own would listen on every address of this machine
        listening.listen()
        at = listening.getsockname()
    except OSError as error:
        listening.close()
        raise RuntimeError(f"{purpose}: rank 0 can't listen there: {error}. Is another place open there?") from error
    # From here on the store owns the socket, and closes it.
    return TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()), at


def _unknown(host: str, error: socket.gaierror) -> str:
    """Say that a host name can't be resolved, and why."""
    return f"the host name {host!r} can't be resolved here ({error.strerror})."


def _come_in(
    place: Place, host: str, port: int, claim: Callable[[TCPStore], tuple[str, Exception] | None], purpose: str
) -> TCPStore:
    """Connect to the store of rank 0, and claim a place there. Tries again until the timeout.

    Or a place that was there before may be about to close.
    """
    begun, seconds = time.monotonic(), place.timeout.total_seconds()
    until, limit = begun + seconds, f"{seconds:g} s"
    problem: Exception | None = None
    is_said, found = False, "it isn't there yet"
    while True:
        if time.monotonic() - begun > long_waits.LONG and not is_said:
            is_said, where = True, f"{purpose[0].lower()}{purpose[1:]}"
            long_waits.say_wait(place.rank, time.monotonic() - begun, [0], where, seconds, {0: found})
        try:
            # By a plain socket first: torch's logs a warning for every try that fails.
            socket.create_connection((host, port), timeout=5 * AGAIN).close()
            store = _client(host, port, place.timeout, until)
            if store is None:
                # If this fails, rank 0 has left in the meantime, and no stranger listens there.
                socket.create_connection((host, port), timeout=5 * AGAIN).close()
                raise _Stranger(f"{purpose}: who listens there didn't answer as rank 0 does, within {limit}.")
            if not store.check(["closed"]):
                wrong = claim(store)
                if wrong is None:
                    return store
                found, problem = wrong
            elif not isinstance(problem, ValueError):
                found = "its place is closed"
                problem = RuntimeError(f"{purpose}: the place there is closed, and no other opened within {limit}.")
        except _Stranger:
            raise
        except socket.gaierror as error:
            # Not raised at once: a cluster may learn the name when rank 0's host is up.
            if not isinstance(problem, _UnknownHost):
                found = "its host name isn't known here"
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
    """The host name of rank 0 can't be resolved."""


class _Stranger(RuntimeError):
    """A process listens at the address that isn't rank 0."""


def _client(host: str, port: int, timeout: timedelta, until: float) -> TCPStore | None:
    """Connect to the store at an address, on a thread of its own. Returns None if that hasn't succeeded by `until`: the
    process there doesn't answer, for which torch's constructor would wait without a limit, or nobody listens, which
    torch tries again until `timeout`. The thread goes on trying after that."""
    try:
        return in_time(
            lambda: TCPStore(host, port, None, False, timeout, wait_for_workers=False),
            max(until - time.monotonic(), AGAIN),
        )
    except FutureTimeout:
        return None


def _world() -> tuple[str | None, int]:
    """Return a random token that all ranks of this world share, and this rank in it; (None, -1) without a world. The
    first rank to call chooses the token, which stays in the world's store."""
    if not dist.is_initialized():
        return None, -1
    store = distributed_c10d._get_default_store()
    token = store.compare_set("torch_overlay/world", "", secrets.token_hex(16)).decode()
    return token, dist.get_rank()


def _default_group_itself() -> ProcessGroup | None:
    """Return the default group of the present world; None if there is no world."""
    return distributed_c10d._get_default_group() if dist.is_initialized() else None


def _default_group() -> weakref.ref[ProcessGroup] | None:
    """Return a reference to the present world's default group; None if there is no world."""
    group = _default_group_itself()
    return None if group is None else weakref.ref(group)


def _disconnect_forked_child() -> None:
    """Disconnect a forked child from the parent's places, without closing the connections of the parent. Runs in each
    child, right after the fork.

    As long as it held them, the port of a parent that died would stay in use, and other ranks wouldn't see the
    connection to a dead rank 0 close. It doesn't close the descriptor: torch's objects still have its number, and would
    later close whichever file got that number next.
    """
    for place in list(_open):
        _open.discard(place)
        if place._listens_at is not None:
            _disconnect(place._listens_at)
        _inherited.extend((place._store, place._server))
        place._store = place._server = None


def _disconnect(at: tuple[Any, ...]) -> None:
    """Lead each descriptor of a socket that is bound or connected to this address to /dev/null."""
    try:
        descriptors = [int(name) for name in os.listdir("/dev/fd")]
        null = os.open(os.devnull, os.O_RDWR)
    except OSError:
        return  # a system without /dev/fd: the sockets stay as they are
    for descriptor in descriptors:
        try:
            with socket.socket(fileno=os.dup(descriptor)) as copied:
                ends = [copied.getsockname()]
                if not copied.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ends.append(copied.getpeername())
        except OSError:
            continue  # no socket, or one that isn't connected
        if any(isinstance(end, tuple) and end[:2] == at[:2] for end in ends):
            os.dup2(null, descriptor, inheritable=False)
    os.close(null)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disconnect_forked_child)
