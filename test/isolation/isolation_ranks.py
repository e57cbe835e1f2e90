"""Gloo ranks that a test hands cases, one at a time, each in a world of its own.

torch's own class of continuous ranks gives up after the first failure, and waits for ever where a rank hangs. Here a
case that is wrong, raises, hangs or kills its process is one failed test: all processes are killed, and the next case
gets new ones. They are forked from a server that has imported torch, so that costs a second, not ten.
"""

from __future__ import annotations

import datetime
import logging
import warnings
from typing import Any

import forks
from torch_overlay.testing.pool import Pool, RankError

RANKS = 8
CASE_SECONDS = 45  # then a rank that hasn't answered hangs
START_TIMEOUT, WORLD_TIMEOUT = datetime.timedelta(seconds=120), datetime.timedelta(seconds=20)


class Ranks:
    """Eight processes, started by the first case; a case for four ranks leaves the others waiting.

    Args:
        seconds: how long a case may take.
    """

    def __init__(self, seconds: float = CASE_SECONDS) -> None:
        self._seconds = seconds
        self._pool: Pool | None = None
        self._worlds = 0

    def ask(self, case: Any, size: int, options: dict[str, object]) -> None:
        """Run `case(rank, size)` on `size` ranks under these options. RankError if it goes wrong on one."""
        if self._pool is None:
            self._pool = Pool(RANKS, _Rank, preload=forks.PRELOADED)
            (port,) = self._pool.ask("listen", ranks=range(1))
            self._pool.ask("join", port, ranks=range(1, RANKS))
            self._pool.timeout = self._seconds
        self._worlds += 1
        try:
            self._pool.ask("run", case, size, options, self._worlds, ranks=range(size))
        except RankError:
            self._pool = None
            raise

    def stop(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()


class _Rank:
    def __init__(self, rank: int) -> None:
        import torch

        self.rank = rank
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")

    def listen(self) -> int:
        return self._open_store(0)

    def join(self, port: int) -> None:
        self._open_store(port)

    def _open_store(self, port: int) -> int:
        import torch.distributed as dist

        how = dict(is_master=self.rank == 0, timeout=START_TIMEOUT, wait_for_workers=False)
        self.store = dist.TCPStore("127.0.0.1", port, **how)
        return self.store.port

    def run(self, case: Any, size: int, options: dict[str, object], world: int) -> None:
        """The world opens and closes under the overlay, as a user's does."""
        import torch.distributed as dist

        from way import overlay

        with overlay(**options):
            store = dist.PrefixStore(str(world), self.store)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=size, timeout=WORLD_TIMEOUT)
            case(self.rank, size)
            dist.barrier()  # nobody closes a connection that another rank still makes
            dist.destroy_process_group()
