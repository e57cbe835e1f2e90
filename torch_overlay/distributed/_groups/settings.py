"""The choices in torch.distributed.config, checked, as one frozen value; and what follows from them for who makes a
group of a mesh: its members alone, or all ranks of the world.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed import distributed_c10d

from .. import config

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup


class Settings(NamedTuple):
    """What a user may choose about groups and redistributions, by the names in torch.distributed.config.

    ``mesh_topology`` has one ``(axis name, bytes per second, seconds of latency)`` for each axis that was described.
    """

    mesh_share_groups: str
    mesh_create_groups: str
    mesh_joint_groups: str
    mesh_check: bool
    mesh_topology: tuple[tuple[str, float, float], ...] | None
    redistribute_cost: str
    plan_redistribution: bool


_WORDS = {
    "mesh_share_groups": ("names", "ranks", "world", "off"),
    "mesh_create_groups": ("members", "world"),
    "mesh_joint_groups": ("existing", "whole", "create"),
    "redistribute_cost": ("steps", "plan"),
}


def get_settings() -> Settings:
    """The choices in force now; ask again at each use, since they change while meshes live.

    Raises:
        ValueError: a choice that isn't one; names it, and what it takes.
    """
    topology = None if config.mesh_topology is None else _rows(config.mesh_topology)
    return _checked(*[getattr(config, name) if name != "mesh_topology" else topology for name in Settings._fields])


def _rows(topology: Any) -> tuple[tuple[Any, ...], ...]:
    """What is kept as a value, however it is written."""
    try:
        return tuple([tuple(row) for row in topology])
    except TypeError:
        return ((topology,),)


@functools.lru_cache(maxsize=64)
def _checked(*values: object) -> Settings:
    settings = Settings(*values)  # type: ignore[arg-type]
    for name, words in _WORDS.items():
        value = getattr(settings, name)
        if value not in words:
            raise ValueError(f"torch.distributed.config.{name} is one of {', '.join(words)}, got {value!r}")
    if not all(map(_describes, settings.mesh_topology or ())):
        raise ValueError(
            "torch.distributed.config.mesh_topology is (name, bytes per second, seconds of latency) for each axis, "
            f"got {settings.mesh_topology!r}"
        )
    return settings


def _describes(row: tuple[Any, ...]) -> bool:
    if len(row) != 3 or not isinstance(row[0], str):
        return False
    return all(isinstance(number, (int, float)) for number in row[1:]) and row[1] > 0 and row[2] >= 0


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
