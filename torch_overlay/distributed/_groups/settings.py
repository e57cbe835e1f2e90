"""The choices in torch.distributed.config, checked, as one frozen value; and what follows from them for who makes a
group of a mesh: its members alone, or all ranks of the world.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed import distributed_c10d

from .. import config

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup


class Settings(NamedTuple):
    """What a user may choose about groups and redistributions, by the names in torch.distributed.config."""

    mesh_share_groups: str
    mesh_create_groups: str
    mesh_joint_groups: str
    mesh_check: bool
    plan_redistribution: bool


_WORDS = {
    "mesh_share_groups": ("names", "ranks", "off"),
    "mesh_create_groups": ("members", "world"),
    "mesh_joint_groups": ("existing", "whole"),
}


def get_settings() -> Settings:
    """The choices in force now; ask again at each use, since they change while meshes live.

    Raises:
        ValueError: a choice that isn't one; names it, and what it takes.
    """
    return _checked(*[getattr(config, name) for name in Settings._fields])


@functools.lru_cache(maxsize=64)
def _checked(*values: object) -> Settings:
    settings = Settings(*values)  # type: ignore[arg-type]
    for name, words in _WORDS.items():
        value = getattr(settings, name)
        if value not in words:
            raise ValueError(f"torch.distributed.config.{name} is one of {', '.join(words)}, got {value!r}")
    return settings


def members_create(world: ProcessGroup, backend: str | None) -> bool:
    """Whether the members of a group can make it without the others.

    MPI can't; a device-bound NCCL world splits, in which all ranks take part; torchcomms has its own way. With it, the
    members make groups of the fake backend, whatever is chosen.
    """
    asked = (backend or distributed_c10d.get_backend(world)).lower()
    if config.use_torchcomms and backend == "fake":
        return True  # compiled code can't resolve numbered names beside those of splits
    return get_settings().mesh_create_groups == "members" and not makes_communicators(world) and "mpi" not in asked


def makes_communicators(world: ProcessGroup) -> bool:
    """Whether a group has its communicator, and the memory of one, from the moment it is made."""
    return world.bound_device_id is not None or config.use_torchcomms
