"""Before costs can be those of plans."""

import dataclasses

from torch.distributed import config


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a user may choose about groups and redistribution.

    ``topology`` is one ``(axis name, bytes per second, seconds of latency)`` for each axis that the user described.
    """

    share_groups: str
    create_groups: str
    joint_groups: str
    check_mesh: bool
    topology: tuple[tuple[str, float, float], ...] | None
    plan: bool


def get_settings() -> Settings:
    """The choices in force now."""
    return Settings(
        share_groups=_one_of("mesh_share_groups", "names", "ranks", "world", "off"),
        create_groups=_one_of("mesh_create_groups", "members", "world"),
        joint_groups=_one_of("mesh_joint_groups", "existing", "whole", "create"),
        check_mesh=config.mesh_check,
        topology=_topology(),
        plan=config.plan_redistribution,
    )
