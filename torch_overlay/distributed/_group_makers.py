"""Who makes a group of a mesh: its members alone, or all ranks of the world."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d

from . import config
from ._settings import get_settings

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup


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
