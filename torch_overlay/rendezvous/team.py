"""The ranks of a transfer with their process groups, and the messages by which they agree during a run.

A `Team` is the ranks that exchange, whichever worlds they belong to. One process group carries their tensors and
nothing else. A control group carries integers and JSON, by tagged messages over gloo. It is the same group if that is
gloo's; else another one, so that the host never waits for a GPU to hear whether all ranks have come.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from inspect import unwrap
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroup

from ..distributed import config
from ..distributed._mesh.text import of_ranks
from ..distributed.distributed_c10d import MemberNames
from .blocking import GivenUp, in_time, interruptibly
from .connections import Connections

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store


LATER = timedelta(seconds=60)  # by which a backend's own timeout comes after that of the watch
# On gloo, where one message over a slow link may take many timeouts, and the watch lets it as long as bytes come.
LATER_ON_GLOO = timedelta(hours=24)
ABORT = 5.0  # seconds that a backend gets to abort a group; after that nobody waits for it any more
NEVER_SENT = (1 << 31) - 1  # a tag that no message has
CONTROL_TAGS = 1 << 20  # tags of teams that share a control group; 0 is the tag where one group carries both
DESCRIPTION = "torch_overlay_transfer"  # what c10d calls these groups, in its logs and its flight recorder
logger = logging.getLogger(__name__)
_names: WeakKeyDictionary[ProcessGroup, MemberNames] = WeakKeyDictionary()
_common: WeakKeyDictionary[ProcessGroup, Common] = WeakKeyDictionary()  # by the world's default group
_kept: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]] = WeakKeyDictionary()


def new_group(
    ranks: Sequence[int], callers: Sequence[int], timeout: timedelta, backend: str | None = None
) -> ProcessGroup | None:
    """Make a process group over some ranks of the world. Collective over these ranks; over the whole world on a backend
    that needs all ranks for it."""
    world = distributed_c10d._get_default_group()
    is_made_by_members = not is_made_by_all()
    if is_made_by_members and dist.get_rank() not in ranks:
        return None
    if not is_made_by_members and len({*callers}) < world.size():
        raise RuntimeError(
            f"All {world.size()} ranks have to make the process group of a transfer on this backend, "
            f"{distributed_c10d.get_backend(world)}, and it is made by {of_ranks(sorted(callers))} alone. Make a "
            "Transfer on all of them (group=None), with None for a side that a rank has no part in."
        )
    name = _names.setdefault(world, MemberNames("transfer")).next(ranks)
    group = _new_group_called(name)(
        list(ranks),
        timeout=timeout,
        backend=backend,
        use_local_synchronization=is_made_by_members,
        group_desc=DESCRIPTION,
    )
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return None
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("made %s, the process group %r of %s", group.group_desc, group.group_name, of_ranks(ranks))
    return group


def is_made_by_all() -> bool:
    """True if making a group takes all ranks of the world, because of its backend (MPI, or torchcomms)."""
    world = distributed_c10d._get_default_group()
    return bool(config.use_torchcomms) or "mpi" in distributed_c10d.get_backend(world)


def _new_group_called(name: str) -> Callable[..., Any]:
    """Return a version of c10d's `new_group` that takes this name for the group, and splits no communicator.

    Two ranks that have made different numbers of groups would wait for each other under two names, and `new_group`
    takes no name. And where the world is bound to its devices, c10d splits the world's communicator, in which every
    rank has to take part. The version returned here runs c10d's code with two of these functions replaced; the module
    isn't changed, so that other threads don't notice.
    """
    new_process_group = _with_globals(
        unwrap(distributed_c10d._new_process_group_helper), _get_split_source=lambda *_: None
    )
    return _with_globals(
        unwrap(distributed_c10d._new_group_with_tag),
        _process_group_name=lambda ranks, use_hashed_name: name,
        _new_process_group_helper=new_process_group,
    )


def _with_globals(function: Any, **others: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function that finds `others` in place of the globals of these names."""
    globals_ = {**function.__globals__, **others}
    copied = FunctionType(function.__code__, globals_, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def kept_group(ranks: Sequence[int]) -> ProcessGroup | None:
    """Return the group over these ranks by which `redistribute` goes from mesh to mesh. Made in the first call,
    collectively, and kept until the world is destroyed. None on a rank that isn't a member."""
    world = distributed_c10d._get_default_group()
    known = _kept.setdefault(world, {})
    group = known.get(tuple(ranks))
    # The program may have destroyed it, with all groups.
    if group is None or group not in distributed_c10d._world.pg_map:
        group = new_group(ranks, ranks, timeout_of(world))
        if group is not None:
            known[tuple(ranks)] = group
    return group


class ControlGroup(NamedTuple):
    """A gloo group for control messages, which all transfers over the same ranks share.

    Attributes:
        group: None on a rank that isn't a member.
        failure_count: how many transfers over these ranks had failed when it was made.
        team_count: counts the teams that use it; each gets a tag of its own.
    """

    group: ProcessGroup | None
    failure_count: int
    team_count: Iterator[int]


class Common:
    """What all transfers of one world, or of one place, share on this rank.

    Args:
        store: of all ranks.

    Attributes:
        store: the same, over a connection of its own, so that a long wait of the program doesn't delay a request. All
            transfers use this one connection: the server looks up the name of each host that connects, and where its
            resolver is slow that takes 5 s, in which it serves nobody else.
        control_groups: by the ranks of their members.
        prefix: begins the keys that count failures.
    """

    def __init__(self, store: Store) -> None:
        self.store = store.clone()
        self.control_groups: dict[tuple[int, ...], ControlGroup] = {}
        self.prefix = ""

    @staticmethod
    def of_world() -> Common:
        """Return that of the present world; made in the first call."""
        world = distributed_c10d._get_default_group()
        common = _common.get(world)
        if common is None:
            common = _common[world] = Common(distributed_c10d._get_default_store())
        return common

    def control_group(
        self, ranks: Sequence[int], store: Store, make: Callable[[], ProcessGroup | None]
    ) -> tuple[ProcessGroup | None, int]:
        """Return the control group of these ranks, and the tag that a new team uses in it. Collective over the ranks.
        Where torch has no gloo, a warning says once what follows from it.

        The group is kept until a transfer over these ranks fails, which closes its connections. Ranks learn of a
        failure at different times. So they first agree on how many failures there were: a rank that still took the
        closed group would wait for ranks that make a new one.
        """
        if not dist.is_gloo_available():
            warn_once("torch has no gloo here, so that what ranks of a Transfer say waits for their devices.")
            return None, 0
        # The first rank to ask decides for all.
        failure_count = int(
            store.compare_set("words", "", str(self.store.add(f"{self.prefix}{failures_key(ranks)}", 0)))
        )
        control = self.control_groups.get(tuple(ranks))
        if control is None or control.failure_count != failure_count:
            control = ControlGroup(make(), failure_count, itertools.count(1))
            self.control_groups[tuple(ranks)] = control
        return control.group, next(control.team_count) % CONTROL_TAGS

    def count_failure(self, ranks: Sequence[int]) -> None:
        """Tell all ranks that a transfer over these ranks failed, so that nobody uses its control group any more."""
        self.store.add(f"{self.prefix}{failures_key(ranks)}", 1)


def failures_key(ranks: Sequence[int]) -> str:
    """Return the key under which a store counts the failures of transfers over these ranks."""
    return f"torch_overlay/failures/{hashlib.sha256(repr([*ranks]).encode()).hexdigest()[:16]}"


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning. The same text a second time is ignored, as long as the process lives."""
    logger.warning(text)


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return how long ranks of a group wait for one another in a collective; c10d's default if no backend says it."""
    # By name, so that "cpu" comes before "cuda": all ranks ask the same backend, whatever devices their hosts have.
    for device in sorted(group._device_types, key=str):
        try:
            return group._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return distributed_c10d.default_pg_timeout


class Team:
    """The ranks that exchange, and this process's groups over them.

    Args:
        group: carries the tensors; None if there is one rank, which sends nothing, or if only control messages are
            sent.
        ranks: the members, in the order of the group.
        rank: this one; a place numbers ranks in another way than their worlds do.
        device: where the group's tensors are.
        name: of the group, the same on all ranks.

    Attributes:
        is_on_gloo: True if the group carries tensors of `device` by gloo, in the memory of the host.
        control: the gloo group for control messages; None where torch has no gloo. All-gathers in `group` carry them
            then.
        gives_up: whether nobody waits any more for messages; None if somebody always does.
        connections: those of the groups.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        name: str = "",
    ) -> None:
        self.group, self.ranks, self.rank, self.device, self.name = group, tuple(ranks), rank, device, name
        self.is_on_gloo = group is not None and device.type == "cpu" and is_gloo(group, device)
        self.control, self._tag = group if self.is_on_gloo else None, 0
        self._limit: timedelta | None = None  # the timeout of messages; None is that of the group
        self.gives_up: Callable[[], bool] | None = None
        self.connections = Connections()
        self._is_stuck = False  # whether a collective in a group doesn't end

    @staticmethod
    def of(group: ProcessGroup | None, device: torch.device) -> Team:
        """Return this rank's team over a process group of its world. Makes no group, and sends nothing."""
        name = "" if group is None else group.group_name
        return Team(group, dist.get_process_group_ranks(group), dist.get_rank(), device, name)

    def use_control_group(self, control: ProcessGroup | None, tag: int) -> None:
        """Send control messages in this group, with this tag, from now on."""
        self.control, self._tag = control, tag

    def extend_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of this rank's groups to LATER more than `timeout`, so that a `Watch` with `timeout` ends a
        wait before the backends do. Later messages of `wait` get it, too.

        An NCCL rank whose backend came first ended its process, and said nothing of who was missing.
        """
        self._limit = timeout + (LATER_ON_GLOO if self.is_on_gloo else LATER)
        for group in self._groups:
            for device in group._device_types:
                try:
                    group._get_backend(device)._set_default_timeout(self._limit)
                except (RuntimeError, AttributeError):
                    continue  # a backend that doesn't exist here, or has no timeout

    def wait(self, message: dist.Work) -> None:
        """Wait until a message of gloo's was sent or came. If `extend_timeout` was called, its timeout holds: the
        message itself still has the one with which its group was made."""
        if self.is_on_gloo:
            self._interruptibly(lambda: self._wait(message))
        else:  # the current stream waits, which is that of this thread
            self._wait(message)

    def wait_for_event(self, event: torch.Event) -> None:
        """Block the host until the device has reached an event; raise GivenUp if it doesn't some time after the
        connections were closed, because the abort failed or hangs."""
        self._interruptibly(event.synchronize)

    def _wait(self, message: dist.Work) -> None:
        message.wait(*(() if self._limit is None else (self._limit,)))

    def _interruptibly(self, wait: Callable[[], Any]) -> Any:
        """Do what `interruptibly` does, until this team gives up."""
        try:
            return interruptibly(wait, self.gives_up)
        except GivenUp:
            self.never_free()
            raise

    @property
    def _groups(self) -> list[ProcessGroup]:
        """The group of the tensors and the control group: one or two groups."""
        return [group for group in {self.group, self.control} if group is not None]

    def connect(self) -> None:
        """Make the communicator of the tensors' group, unless gloo made one together with the group. Collective.

        NCCL makes it in the first collective of a group, in which all ranks have to take part. The host waits in that,
        and aborting the group doesn't end it: if a rank has died meanwhile, the others hung on an H100.
        """
        if not self.is_on_gloo and self.group is not None:
            reduce = self.call(dist.all_reduce)
            self._interruptibly(lambda: reduce(torch.zeros(1, device=self.device), group=self.group))

    @property
    def is_fake(self) -> bool:
        """True if the group is of torch's fake backend, which sends nothing."""
        return self.group is not None and distributed_c10d._world.pg_map.get(self.group, ("",))[0] == "fake"

    def close_connections(self) -> None:
        """End every wait in the groups of this rank, in any thread, with an error. No message arrives any more.

        The groups can't be used again; `destroy` still works.
        """
        try:
            if self.control is not None:  # first: it closes at once, and an abort may fail or hang
                _close_gloo(self.control)
        finally:
            if self.group is not None and self.group is not self.control:
                in_time(self.group.abort, ABORT)

    def never_free(self) -> None:
        """Keep the groups until the process ends, because a collective in one of them doesn't end.

        The destructor of a gloo group waits for its threads, and the interpreter waits with it. A reference in a module
        would be dropped while the interpreter ends.
        """
        self._is_stuck = True
        for group in self._groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def destroy(self) -> None:
        """Destroy the group of the tensors. Does nothing if c10d doesn't know it: the group of a place, which ends with
        its last reference, or one whose world was destroyed before."""
        group = self.group
        if group is None or group not in distributed_c10d._world.pg_map:
            return
        if self._is_stuck and not self.is_on_gloo:  # NCCL would wait here for what couldn't be aborted
            with contextlib.suppress(FutureTimeout):
                in_time(lambda: dist.destroy_process_group(group), ABORT)
        else:
            dist.destroy_process_group(group)

    def call(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Return a collective of c10d's in a form that works on this group.

        When a collective fails, c10d's decorator asks for the group's backend to log it. It doesn't know the group of a
        place, and raises "Process group not initialized in the world group map" in place of what failed. So there the
        decorator is left out.
        """
        is_known = self.group is None or self.group in distributed_c10d._world.pg_map
        return collective if is_known else unwrap(collective)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Send integers to all ranks, and return those of each rank: a row for each, in the order of `ranks`.

        Collective; all ranks give as many integers, of at most 64 bits. Returns when all of them have come.
        """
        return self._gather(torch.tensor(numbers, dtype=torch.int64, device="cpu")).tolist()  # type: ignore[no-any-return]

    def gather_data(self, said: Any) -> dict[int, Any]:
        """Send a value that JSON takes to all ranks, and return that of each rank, by rank. Collective. Raises as
        `gather`."""
        text = json.dumps(said).encode()
        sizes = [size for (size,) in self.gather([len(text)])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = self._gather(padded).tolist()
        return {rank: json.loads(bytes(row[:size])) for rank, row, size in zip(self.ranks, rows, sizes)}

    def swap(self, messages: Sequence[bytes]) -> list[bytes]:
        """Send each rank a message of its own, and return the message of each rank for this one. Collective. Needs a
        control group (`use_control_group`), unless there is one rank: without one, nothing is sent, and this rank's own
        messages come back."""
        group = self.control
        if len(self.ranks) == 1 or group is None:
            return [*messages]
        place, size = group.rank(), group.size()
        # Each rank begins with the next one, so that not all of them send to one rank first.
        peers = [*range(place + 1, size), *range(place)]
        # Sizes first, in both columns: what this rank sends, and what it gets.
        sizes = torch.tensor([[len(message), 0] for message in messages], dtype=torch.int64, device="cpu")
        into = {peer: sizes[peer, 1:] for peer in peers}
        self._interruptibly(lambda: self._send_and_receive({peer: sizes[peer, :1] for peer in peers}, into))
        received = {peer: bytearray(count) for peer, count in enumerate(sizes[:, 1].tolist()) if count}
        sent = {peer: bytearray(messages[peer]) for peer in peers if messages[peer]}
        out, into = (
            {peer: torch.frombuffer(data, dtype=torch.uint8) for peer, data in direction.items()}
            for direction in (sent, received)
        )
        self._interruptibly(lambda: self._send_and_receive(out, into))
        return [messages[place] if peer == place else bytes(received.get(peer, b"")) for peer in range(size)]

    def _send_and_receive(self, out: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor]) -> None:
        """Send and receive messages in the control group, and wait for all of them."""
        if self.control is None:
            raise AssertionError("ranks that swap messages have a control group")
        messages = [self.control.recv([data], peer, self._tag) for peer, data in into.items()]
        messages += [self.control.send([data], peer, self._tag) for peer, data in out.items()]
        for message in messages:
            self._wait(message)

    def _gather(self, own: torch.Tensor) -> torch.Tensor:
        """Gather a vector of equal length from each rank, as the rows of a matrix. Collective."""
        if len(self.ranks) == 1 or self.group is None:
            return own[None]
        if self.control is not None:
            control = self.control
            rows: torch.Tensor = self._interruptibly(lambda: self._gather_by_doubling(control, own))
            return rows
        given = own.to(self.device)
        rows = given.new_empty(len(self.ranks), len(own))
        self.call(dist.all_gather)([*rows.unbind()], given, group=self.group)
        return rows

    def _gather_by_doubling(self, group: ProcessGroup, own: torch.Tensor) -> torch.Tensor:
        """Gather a vector from each rank of a gloo group, as the rows of a matrix in the order of the group.

        In each of log2(size) rounds a rank sends all rows that it has, so that it has twice as many afterwards (Bruck
        et al., "Efficient algorithms for all-to-all communications", 1997). c10d's all_gather would do, but it matches
        calls by their order: two transfers that run in two threads may share this group, and are told apart by tag.
        """
        place, size = group.rank(), group.size()
        rows = own.new_empty(size, len(own))  # row i is that of place + i
        rows[0] = own
        count = 1  # rows that are there
        while count < size:
            more = min(count, size - count)
            receive = group.recv([rows[count : count + more]], (place + count) % size, self._tag)
            send = group.send([rows[:more]], (place - count) % size, self._tag)
            self._wait(receive)
            self._wait(send)
            count += more
        return rows.roll(place, 0)


def _close_gloo(group: ProcessGroup) -> None:
    """Close the connections of a gloo group, so that every wait in it ends with an error. gloo's `abort` does
    nothing (torch 2.11 to 2.15), but a receive that times out closes the connections.

    So this asks each rank for a message that nobody sends.
    """
    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
    for peer in {*range(group.size())} - {group.rank()}:
        try:
            group.recv([nothing], peer, NEVER_SENT).wait(timedelta(milliseconds=1))
        except RuntimeError:
            continue


def is_gloo(group: ProcessGroup, device: torch.device) -> bool:
    """True if a group moves tensors of this device's type by gloo. False if it has no backend for that type."""
    try:
        return bool(group._get_backend(device).name() == "gloo")
    except RuntimeError:
        return False
