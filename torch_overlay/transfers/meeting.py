"""Meetings: all ranks of a group come to one place and each says something; whoever is missing is named.

By the store of the group and not by a collective: a collective that lacks a rank says that some time has passed.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroup

from ..distributed._rank_map import of_ranks, short
from .groups import timeout_of

if TYPE_CHECKING:
    from torch.distributed import Store

_numbers: WeakKeyDictionary[ProcessGroup, Counter[str]] = WeakKeyDictionary()


def living(ranks: Any, what: str) -> list[int]:
    """Ranks as a user gives them, each of which the world has.

    Raises:
        TypeError: what is given is no list of ranks; a rank outside of a group has no group to give.
        ValueError: a rank can't exist, or stands there twice; nobody would ever come for it.
    """
    if not isinstance(ranks, Collection) or not all(isinstance(rank, int) for rank in ranks):
        raise TypeError(
            f"{what} needs a process group that rank {dist.get_rank()} is in, or a list of ranks; got {ranks!r}"
        )
    last = dist.get_world_size() - 1
    beyond = sorted({rank for rank in ranks if not 0 <= rank <= last})
    if beyond:
        raise ValueError(f"{what} has ranks that can't exist: {beyond}. This world has {of_ranks(range(last + 1))}.")
    twice = sorted([rank for rank, count in Counter(ranks).items() if count > 1])
    if twice:
        raise ValueError(f"{what} has rank {short(twice)} twice: {[*ranks]}.")
    return [*ranks]


class Meeting:
    """One meeting of the ranks of a group, or of these ranks, or of all; they hold their meetings in the same order."""

    def __init__(self, group: ProcessGroup | Sequence[int] | None, purpose: str) -> None:
        world = distributed_c10d._get_default_group()
        if group is None or isinstance(group, ProcessGroup):
            self.ranks: list[int] = dist.get_process_group_ranks(group or world)
            self.timeout, name = timeout_of(group or world), (group or world).group_name
        else:
            self.ranks, self.timeout = sorted(living(group, "group")), timeout_of(world)
            name = hashlib.sha256(repr(self.ranks).encode()).hexdigest()
        self.rank, self.purpose = dist.get_rank(), purpose
        if self.rank not in self.ranks:
            raise ValueError(f"{purpose} of {of_ranks(self.ranks)} can't be made by rank {self.rank}.")
        held = _numbers.setdefault(world, Counter())
        held[name] += 1
        store: Store = distributed_c10d._get_default_store()
        self.store = dist.PrefixStore(f"torch_overlay/{name}/{held[name]}", store)

    def say(self, what: Any) -> dict[int, Any]:
        """What each rank says, by rank: what JSON takes, and reading it runs nothing. Equal things are stored once,
        whoever says them, and are one object.

        Raises:
            RuntimeError: a rank didn't come within the group's timeout, or this one came too late.
        """
        said = zlib.compress(json.dumps(what).encode())
        key = hashlib.sha256(said).hexdigest()
        if not self.store.check([key]):
            self.store.set(key, said)
        self.store.set(f"rank {self.rank}", key)
        self._wait()
        keys = dict(zip(self.ranks, self._words([f"rank {rank}" for rank in self.ranks])))
        known = {key: json.loads(zlib.decompress(self.store.get(key))) for key in {*keys.values()}}
        self._clear([*known, *[f"rank {rank}" for rank in self.ranks]])
        return {rank: known[key] for rank, key in keys.items()}

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
            "All of these ranks call it, in one order with what else they do; a rank without a part gives None."
        )

    def _clear(self, keys: list[str]) -> None:
        """The last one to have read everything leaves nothing behind."""
        if self.store.add("left", 1) == len(self.ranks):
            for key in (*keys, "missing", "left"):
                self.store.delete_key(key)


LONGEST = 5  # seconds that ranks wait for one another after a failure


def silent_ranks(ranks: Sequence[int], failure: str, timeout: timedelta) -> list[int]:
    """After a failure, which of these ranks don't come within a few seconds to say that they met it, too.

    They died, hang, or had no part in what failed. Nobody is named if the store is gone as well.
    """
    try:
        store = dist.PrefixStore(f"torch_overlay/{failure}", distributed_c10d._get_default_store())
        store.set(f"rank {dist.get_rank()}", "")
        try:
            store.wait([f"rank {rank}" for rank in ranks], min(timeout, timedelta(seconds=LONGEST)))
        except RuntimeError:
            return [rank for rank in ranks if not store.check([f"rank {rank}"])]
    except RuntimeError:
        pass
    return []
