"""A world of any size that one process plays one rank of: meshes and groups are real, collectives move nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class GroupCounter:
    """Counts the calls that ask for a group, in the one function that all of them pass, and knows the open groups."""

    def __init__(self) -> None:
        self.calls = 0
        self._create = c10d._new_group_with_tag

    def __enter__(self) -> GroupCounter:
        c10d._new_group_with_tag = self._counted
        return self

    def __exit__(self, *exception: object) -> None:
        c10d._new_group_with_tag = self._create

    def _counted(self, *arguments, **named):
        self.calls += 1
        return self._create(*arguments, **named)

    @staticmethod
    def open() -> list[tuple[int, ...]]:
        world = c10d._get_default_group()
        return [tuple(dist.get_process_group_ranks(group)) for group in c10d._world.pg_map if group is not world]
