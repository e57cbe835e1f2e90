"""Upstream the choices are in torch.distributed.config."""

import dataclasses

from torch.distributed import config


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a user may choose about groups and redistribution.

    ``topology`` is one ``(axis name, bytes per second, seconds of latency)`` for each axis that the user described.
    """

    share_groups: str
    create: str
    flatten: str
    check_mesh: bool
    cost: str
    topology: tuple[tuple[str, float, float], ...] | None


def get_settings() -> Settings:
    """The choices in force now; ask again at each use, since they change while meshes live."""
    return Settings(
        share_groups=config.mesh_share_groups,
        create=config.mesh_create_groups,
        flatten=config.mesh_joint_groups,
        check_mesh=config.mesh_check,
        cost=config.redistribute_cost,
        topology=config.mesh_topology,
    )


set_settings = ...
_current = ...
DEFAULT = ...
__all__ = ...  # noqa: PLE0605
