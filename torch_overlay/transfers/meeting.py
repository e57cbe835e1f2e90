"""Meetings: all ranks of a group come to one place and each says something; whoever is missing is named.

By the store of the group and not by a collective: a collective that lacks a rank says that some time has passed.
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..distributed._rank_map import short

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

_numbers: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


class Meeting:
    """One meeting of the ranks of a group, which all of them hold in the same order."""

    def __init__(self, group: ProcessGroup, purpose: str) -> None:
        number = _numbers[group] = _numbers.get(group, 0) + 1
        self.ranks, self.rank = dist.get_process_group_ranks(group), dist.get_rank()
        self.purpose, self.timeout = purpose, timeout_of(group)
        store: Store = distributed_c10d._get_default_store()
        self.store = dist.PrefixStore(f"torch_overlay/{group.group_name}/{number}", store)

    def say(self, what: Any) -> dict[int, Any]:
        """What each rank says, by rank. Equal things are stored once, whoever says them.

        Raises:
            RuntimeError: a rank didn't come within the group's timeout, or this one came too late.
        """
        said = zlib.compress(pickle.dumps(what))
        key = hashlib.sha256(said).hexdigest()
        if not self.store.check([key]):
            self.store.set(key, said)
        self.store.set(f"rank {self.rank}", key)
        if self.store.check(["given up"]):
            raise RuntimeError(self._missing(pickle.loads(self.store.get("given up"))))
        self._wait()
        keys = {rank: self.store.get(f"rank {rank}").decode() for rank in self.ranks}
        known = {key: pickle.loads(zlib.decompress(self.store.get(key))) for key in {*keys.values()}}
        self._clear([*known, *[f"rank {rank}" for rank in self.ranks]])
        return {rank: known[key] for rank, key in keys.items()}

    def _wait(self) -> None:
        try:
            self.store.wait([f"rank {rank}" for rank in self.ranks], self.timeout)
        except RuntimeError as error:
            missing = [rank for rank in self.ranks if not self.store.check([f"rank {rank}"])]
            if not missing:
                raise
            self.store.set("given up", pickle.dumps(missing))
            raise RuntimeError(self._missing(missing)) from error

    def _missing(self, ranks: list[int]) -> str:
        limit = f"{self.timeout.total_seconds():g} s"
        return (
            f"{self.purpose} needs ranks {short(self.ranks)}, and rank {short(ranks)} didn't come within {limit}. "
            "All of these ranks call it, in one order with what else they do; a rank without a part gives None."
        )

    def _clear(self, keys: list[str]) -> None:
        """The last one to have read everything leaves nothing behind."""
        if self.store.add("left", 1) == len(self.ranks):
            for key in (*keys, "left"):
                self.store.delete_key(key)


def timeout_of(group: ProcessGroup) -> timedelta:
    """How long the ranks of a group wait for one another."""
    for device in (torch.device("cpu"), torch.accelerator.current_accelerator()):
        try:
            if device is not None:
                return group._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return distributed_c10d.default_pg_timeout
