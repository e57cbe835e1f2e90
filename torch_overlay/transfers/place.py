"""Places: where processes of several torch.distributed worlds, or of none, meet and are numbered anew."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import socket
import time
from collections import Counter
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, TCPStore, distributed_c10d

from ..distributed._mesh.rank_map import of_ranks
from .groups import DESCRIPTION
from .meeting import Meeting
from .teams import Team

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

KEY = "TORCH_OVERLAY_MEET_KEY"
AGAIN = 0.2  # seconds between two tries to come in
LEAVING = 5.0  # seconds that rank 0 waits for the others to leave


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
        numbers: for each rank of this process's own world that met here, its rank here.
    """

    def __init__(self, address: str, rank: int, world_size: int, key: str | bytes | None, timeout: float) -> None:
        host, port = _read(address)
        if not 0 <= rank < world_size:
            raise ValueError(f"meet() needs a rank from 0 to {world_size - 1}, world_size - 1; got {rank}.")
        key = os.environ.get(KEY) if key is None else key
        if key is not None and not key:
            raise ValueError(f"meet() needs a key that isn't empty, or none: by key=, or by {KEY}.")
        self.rank, self.size, self.timeout = rank, world_size, timedelta(seconds=timeout)
        self._address, self._held, self._teams = address, Counter[str](), Counter[str]()
        self._purpose = f"A meeting of {world_size} at {address}"
        self._server = _listening(host, port, self.timeout, self._purpose) if rank == 0 else None
        nonce = secrets.token_hex(16)
        self._store: Any = _come_in(self, host, port, nonce, self._purpose)
        self._seal = None
        try:
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

    def meeting(self, purpose: str, ranks: Sequence[int] | None = None) -> Meeting:
        """The next meeting of these ranks, or of all."""
        if self._store is None:
            raise RuntimeError(f"The place at {self._address} is closed. Meet again.")
        some = sorted(range(self.size) if ranks is None else ranks)
        name = hashlib.sha256(repr(some).encode()).hexdigest()
        self._held[name] += 1
        store = PrefixStore(f"meeting/{name}/{self._held[name]}", self._store)
        hint = "Each process calls meet() with a rank of its own." if purpose == self._purpose else ""
        seal = None if self._seal is None else self._seal.within(f"{name}/{self._held[name]}")
        return Meeting(some, self.rank, store, self.timeout, purpose, seal, hint, keeper=0)

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
        return Team(group, tuple(ranks), self.rank, name)

    def of_world(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Ranks of this process's own world, as they are numbered here.

        Raises:
            ValueError: some didn't meet here.
        """
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
        store, self._store = self._store, None
        if store is None:
            return
        try:
            if self.rank == 0:
                store.set("closed", "")
            store.set(f"left {self.rank}", "")
            if self.rank == 0:
                came = [rank for rank in range(self.size) if store.check([f"came {rank}"])]
                store.wait([f"left {rank}" for rank in came], timedelta(seconds=LEAVING))
        except RuntimeError:
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


def _listening(host: str, port: int, timeout: timedelta, purpose: str) -> TCPStore:
    """The store of a place, which lives as long as this."""
    family, _, _, _, at = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(at)  # torch's own would listen on each address of this machine
        listening.listen()
    except OSError as error:
        listening.close()
        raise RuntimeError(f"{purpose}: rank 0 can't listen there: {error}. Is another place open there?") from error
    # It closes the socket.
    return TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach())


def _come_in(place: Place, host: str, port: int, nonce: str, purpose: str) -> TCPStore:
    """The store of rank 0, which may come later, or be about to close the place that was here before.

    Raises:
        RuntimeError: rank 0 didn't come in time, or somebody else is there.
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
                size = int(store.compare_set("size", "", str(place.size)))
                if size != place.size:
                    raise ValueError(f"{purpose}: others give world_size {size}. All give the same one.")
                if store.compare_set(f"came {place.rank}", "", nonce).decode() == nonce:
                    return store
                problem = ValueError(
                    f"{purpose} has a rank {place.rank} already, and it didn't leave within {limit}. Each process has "
                    "a rank of its own; after a restart rank 0 closes the place, and all meet again."
                )
        except _Stranger:
            raise
        except (OSError, RuntimeError) as error:
            problem = problem or RuntimeError(f"{purpose}: nobody listened there within {limit}. Is rank 0 there?")
            problem.__cause__ = error
        if time.monotonic() > until and problem is not None:
            raise problem
        time.sleep(AGAIN)


class _Stranger(RuntimeError):
    """Somebody listens at the address, and it isn't rank 0."""


def _client(host: str, port: int, timeout: timedelta, until: float) -> TCPStore | None:
    """A store of who listens there; None if that doesn't answer: torch's own waits for it without a limit."""
    made: Future[TCPStore] = Future()

    def make() -> None:
        try:
            made.set_result(TCPStore(host, port, None, False, timeout, wait_for_workers=False))
        except Exception as error:
            made.set_exception(error)

    Thread(target=make, name="torch_overlay meet", daemon=True).start()
    try:
        return made.result(max(until - time.monotonic(), AGAIN))
    except FutureTimeout:
        return None


def _world() -> tuple[str | None, int]:
    """A token that the ranks of a world share, and this rank in it; None in no world."""
    if not dist.is_initialized():
        return None, -1
    store = distributed_c10d._get_default_store()
    token = store.compare_set("torch_overlay/world", "", secrets.token_hex(16)).decode()
    return token, dist.get_rank()
