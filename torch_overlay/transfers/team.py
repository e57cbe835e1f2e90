"""The ranks of a transfer with their process groups, and how they tell one another something during a run.

A `Team` is the ranks that exchange, whatever world they are of, with a group that carries their tensors and is used
for nothing else. What ranks say to one another goes by tagged messages over gloo: in that group if it is gloo's, else
in one beside it, so that the host never waits for a device to hear whether all ranks have come.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
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
from .watch import in_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store


LATER = timedelta(seconds=60)
ABORT = 5.0  # seconds in which a backend aborts a group, or is left behind
NEVER_SENT = (1 << 31) - 1  # a tag
TAGS_OF_WORDS = 1 << 20  # of teams that share a group of words; 0 is that of words in a group of tensors
DESCRIPTION = "torch_overlay_transfer"  # what c10d calls these groups, in its logs and its flight recorder
logger = logging.getLogger(__name__)
_names: WeakKeyDictionary[ProcessGroup, MemberNames] = WeakKeyDictionary()
_common: WeakKeyDictionary[ProcessGroup, Common] = WeakKeyDictionary()  # by the world
_kept: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]] = WeakKeyDictionary()


def new_group(
    ranks: Sequence[int], callers: Sequence[int], timeout: timedelta, backend: str | None = None
) -> ProcessGroup | None:
    """A group over these ranks, made by them where the backend lets members make one alone, else by the whole world;
    None on a rank outside.

    Raises:
        RuntimeError: the world must make it, and some ranks of it don't call this.
    """
    world = distributed_c10d._get_default_group()
    alone = not is_made_by_all()
    if alone and dist.get_rank() not in ranks:
        return None
    if not alone and len({*callers}) < world.size():
        raise RuntimeError(
            f"All {world.size()} ranks have to make the process group of a transfer on this backend, "
            f"{distributed_c10d.get_backend(world)}, and it is made by {of_ranks(sorted(callers))} alone. Make a "
            "Transfer on all of them (group=None), with None for a side that a rank has no part in."
        )
    name = _names.setdefault(world, MemberNames("transfer")).next(ranks)
    how = {"timeout": timeout, "backend": backend, "use_local_synchronization": alone, "group_desc": DESCRIPTION}
    made = _new_group_called(name)(list(ranks), **how)
    if made == dist.GroupMember.NON_GROUP_MEMBER:
        return None
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("made %s, the process group %r of %s", made.group_desc, made.group_name, of_ranks(ranks))
    return made


def is_made_by_all() -> bool:
    """Whether all ranks of the world have to take part in making a group on its backend."""
    world = distributed_c10d._get_default_group()
    return bool(config.use_torchcomms) or "mpi" in distributed_c10d.get_backend(world)


def _new_group_called(name: str) -> Callable[..., Any]:
    """What is behind `new_group`, for a group of this name that isn't split from the world's.

    c10d names a group that its members make by what else this rank has made, so that ranks whose histories differ wait
    for one another under two names; and it takes no name. Where the world is bound to its devices, it splits the
    world's communicator, in which every rank has to take part. It asks for both by functions of its module: this is the
    same code, and finds others there. Nothing that other threads use is changed.
    """
    makes = _copied(unwrap(distributed_c10d._new_process_group_helper), _get_split_source=lambda *_: None)
    return _copied(
        unwrap(distributed_c10d._new_group_with_tag),
        _process_group_name=lambda ranks, use_hashed_name: name,
        _new_process_group_helper=makes,
    )


def _copied(function: Any, **others: Callable[..., Any]) -> Callable[..., Any]:
    """The same code, for which its module has these other functions."""
    found = {**function.__globals__, **others}
    made = FunctionType(function.__code__, found, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def kept_group(ranks: Sequence[int]) -> ProcessGroup | None:
    """The group by which redistributions over these ranks go from mesh to mesh, kept by the world."""
    world = distributed_c10d._get_default_group()
    known = _kept.setdefault(world, {})
    group = known.get(tuple(ranks))
    if group is None or group not in distributed_c10d._world.pg_map:
        group = new_group(ranks, ranks, timeout_of(world))
        if group is not None:
            known[tuple(ranks)] = group
    return group


class Words(NamedTuple):
    """A gloo group that carries what ranks say, beside groups of another backend.

    Attributes:
        number: how many failures of transfers over these ranks there were when it was made.
        teams: a counter of those that use it, for their tags.
    """

    group: ProcessGroup | None
    number: int
    teams: Iterator[int]


class Common:
    """What the transfers of one world, or of one place, have in common on a rank.

    Attributes:
        store: the one of all ranks, over a connection of its own, so that no long wait of the program delays a request.
            One for all transfers, since a server looks up the name of whoever connects: where its resolver is slow,
            that takes 5 s, in which nobody else is served.
        words: by ranks, the group for what they say.
    """

    def __init__(self, store: Store) -> None:
        self.store = store.clone()
        self.words: dict[tuple[int, ...], Words] = {}

    @staticmethod
    def of_world() -> Common:
        """That of the present world."""
        world = distributed_c10d._get_default_group()
        found = _common.get(world)
        if found is None:
            found = _common[world] = Common(distributed_c10d._get_default_store())
        return found

    def words_of(
        self, ranks: Sequence[int], own: Store, make: Callable[[], ProcessGroup | None]
    ) -> tuple[ProcessGroup | None, int]:
        """The group of words of these ranks, and the tag of a new team in it. Collective over them.

        It is kept until a transfer over these ranks fails, whose connections are closed then. Ranks learn of a failure
        one after the other, so they agree on the number of failures first: one that kept a closed group would wait.

        Args:
            own: the store of the new team.
        """
        if not dist.is_gloo_available():
            warn_once("torch has no gloo here, so that what ranks of a Transfer say waits for their devices.")
            return None, 0
        number = int(own.compare_set("words", "", str(self.store.add(failures_key(ranks), 0))))
        words = self.words.get(tuple(ranks))
        if words is None or words.number != number:
            words = self.words[tuple(ranks)] = Words(make(), number, itertools.count(1))
        return words.group, next(words.teams) % TAGS_OF_WORDS

    def count_failure(self, ranks: Sequence[int]) -> None:
        """A transfer over these ranks failed, and they can't use their group of words any more."""
        self.store.add(failures_key(ranks), 1)


def failures_key(ranks: Sequence[int]) -> str:
    """Where a store counts the failures of transfers over these ranks."""
    return f"torch_overlay/failures/{hashlib.sha256(repr([*ranks]).encode()).hexdigest()[:16]}"


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, once in a process."""
    logger.warning(text)


def timeout_of(group: ProcessGroup) -> timedelta:
    """How long the ranks of a group wait for one another."""
    for device in sorted(group._device_types, key=str):  # the host's memory first; whatever else this host has
        try:
            return group._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return distributed_c10d.default_pg_timeout


class Team:
    """The ranks that exchange, and this process's ends of their groups.

    Args:
        group: carries the tensors; None where nothing is sent.
        ranks: by their place in the group.
        rank: this one, as `ranks` numbers them.
        device: where the group's tensors are.
        name: of the group, the same on all ranks.

    Attributes:
        is_on_gloo: whether the group carries tensors of `device` by gloo, in the memory of the host.
        words: the gloo group for what ranks say; None where torch has no gloo: all-gathers in `group` say it then.
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
        self.words, self._tag = group if self.is_on_gloo else None, 0
        self._limit: timedelta | None = None

    @staticmethod
    def of(group: ProcessGroup | None, device: torch.device) -> Team:
        """The ranks of a group of torch's; those of the world, if there is none."""
        name = "" if group is None else group.group_name
        return Team(group, dist.get_process_group_ranks(group), dist.get_rank(), device, name)

    def use_words(self, words: ProcessGroup | None, tag: int) -> None:
        """Say words in this group from now on."""
        self.words, self._tag = words, tag

    def wait_longer(self, timeout: timedelta) -> None:
        """Let the backends wait for longer than this, so that a `Watch` ends a wait before they do.

        They ended the process of an NCCL rank without a word about who was missing.
        """
        self._limit = timeout + LATER
        for group in self._groups:
            for device in group._device_types:
                try:
                    group._get_backend(device)._set_default_timeout(self._limit)
                except (RuntimeError, AttributeError):
                    continue  # a backend that doesn't exist here, or has no timeout

    def wait(self, message: dist.Work) -> None:
        """Wait until a message of gloo's was sent or came. Its messages have the timeout that the group was made with,
        whatever its default is now."""
        message.wait() if self._limit is None else message.wait(self._limit)

    @property
    def _groups(self) -> list[ProcessGroup]:
        """The group of the tensors and that of the words, where they aren't one."""
        return [group for group in {self.group, self.words} if group is not None]

    def connect(self) -> None:
        """Make the communicator of the tensors, unless it is there since their group was made, as gloo's. Collective.

        NCCL makes one in the first collective of a group, which all of its ranks have to call.
        """
        if not self.is_on_gloo and self.group is not None:
            self.call(dist.all_reduce)(torch.zeros(1, device=self.device), group=self.group)

    @property
    def is_fake(self) -> bool:
        """Whether nothing is sent, by torch's fake backend."""
        return self.group is not None and distributed_c10d._world.pg_map.get(self.group, ("",))[0] == "fake"

    def close_connections(self) -> None:
        """End whatever waits in the groups of this rank, in any thread, and let nothing arrive any more.

        The groups can't be used again; `destroy` still works.
        """
        for group in self._groups:
            if group is self.words:  # gloo, whatever carries the tensors
                _close_gloo(group)
            else:
                in_time(group.abort, ABORT)

    def destroy(self) -> None:
        """Destroy the group, unless c10d doesn't know it: a place's, or one whose world was destroyed before."""
        if self.group is not None and self.group in distributed_c10d._world.pg_map:
            dist.destroy_process_group(self.group)

    def call(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """A collective of c10d's, for this group.

        Where one fails, c10d asks for the group's backend to log it, and a place's group is none that it knows: people
        read "Process group not initialized in the world group map" in place of what failed. So without that log there.
        """
        is_known = self.group is None or self.group in distributed_c10d._world.pg_map
        return collective if is_known else unwrap(collective)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """What each rank says, in whole numbers of 64 bits: a row for each rank, in the order of `ranks`.

        Collective; all ranks give as many numbers. Returns when all of them have come.
        """
        return self._gather(torch.tensor(numbers, dtype=torch.int64, device="cpu")).tolist()  # type: ignore[no-any-return]

    def gather_data(self, said: Any) -> dict[int, Any]:
        """What each rank says, by rank: anything that JSON takes. Collective."""
        text = json.dumps(said).encode()
        lengths = [length for (length,) in self.gather([len(text)])]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = self._gather(padded).tolist()
        return {rank: json.loads(bytes(row[:size])) for rank, row, size in zip(self.ranks, rows, lengths)}

    def swap(self, letters: Sequence[bytes]) -> list[bytes]:
        """What each rank has for this one, in the order of `ranks`, as `letters` are what this one has for each.
        Collective over ranks that have a group of words."""
        group = self.words
        if len(self.ranks) == 1 or group is None:
            return [*letters]
        place, size = group.rank(), group.size()
        peers = [*range(place + 1, size), *range(place)]
        sizes = torch.tensor([[len(letter), 0] for letter in letters], dtype=torch.int64, device="cpu")
        self._send({n: sizes[n, :1] for n in peers}, {n: sizes[n, 1:] for n in peers})
        came = {n: bytearray(many) for n, many in enumerate(sizes[:, 1].tolist()) if many}
        going = {n: bytearray(letters[n]) for n in peers if letters[n]}
        out, into = ({n: torch.frombuffer(each, dtype=torch.uint8) for n, each in way.items()} for way in (going, came))
        self._send(out, into)
        return [letters[place] if n == place else bytes(came.get(n, b"")) for n in range(size)]

    def _send(self, going: Mapping[int, torch.Tensor], coming: Mapping[int, torch.Tensor]) -> None:
        """Messages by the group of words, by place of the other rank in it."""
        if self.words is None:
            raise AssertionError("ranks that swap letters have a group of words")
        begun = [self.words.recv([data], peer, self._tag) for peer, data in coming.items()]
        begun += [self.words.send([data], peer, self._tag) for peer, data in going.items()]
        for message in begun:
            self.wait(message)

    def _gather(self, own: torch.Tensor) -> torch.Tensor:
        if len(self.ranks) == 1 or self.group is None:
            return own[None]
        if self.words is not None:
            return self._gather_by_doubling(self.words, own)
        given = own.to(self.device)
        rows = given.new_empty(len(self.ranks), len(own))
        self.call(dist.all_gather)([*rows.unbind()], given, group=self.group)
        return rows

    def _gather_by_doubling(self, group: ProcessGroup, own: torch.Tensor) -> torch.Tensor:
        """The vectors of all ranks of a gloo group, a row each, in the order of the group.

        In each of log2(size) rounds a rank passes on all rows that it has, so that it has twice as many afterwards
        (Bruck et al., "Efficient algorithms for all-to-all communications", 1997). Messages are matched by tag, and not
        by the order of calls as collectives are: two threads may use one group.
        """
        place, size = group.rank(), group.size()
        rows = own.new_empty(size, len(own))  # row i is that of place + i
        rows[0] = own
        have = 1
        while have < size:
            more = min(have, size - have)
            coming = group.recv([rows[have : have + more]], (place + have) % size, self._tag)
            going = group.send([rows[:more]], (place - have) % size, self._tag)
            self.wait(coming)
            self.wait(going)
            have += more
        return rows.roll(place, 0)


def _close_gloo(group: ProcessGroup) -> None:
    """Close a gloo group's connections.

    Its `abort` does nothing (torch 2.11 to 2.15), but a receive that times out closes all connections, so that every
    other wait in the group ends with an error. So this receives what nobody sends, from each rank: where a connection
    is closed already the receive fails at once, and leaves the other ones open.
    """
    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
    for peer in {*range(group.size())} - {group.rank()}:
        try:
            group.recv([nothing], peer, NEVER_SENT).wait(timedelta(milliseconds=1))
        except RuntimeError:
            continue


def is_gloo(group: ProcessGroup, device: torch.device) -> bool:
    """Whether a group moves tensors of this device's type by gloo."""
    try:
        return bool(group._get_backend(device).name() == "gloo")
    except RuntimeError:
        return False
