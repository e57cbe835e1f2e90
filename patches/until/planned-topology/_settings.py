"""Before a user may say how fast the axes are."""

import dataclasses

from torch.distributed import config


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a user may choose about groups and redistribution."""

    share_groups: str
    create_groups: str
    joint_groups: str
    check_mesh: bool
    plan: bool


def get_settings() -> Settings:
    """The choices in force now."""
    return Settings(
        share_groups=_one_of("mesh_share_groups", "names", "ranks", "world", "off"),
        create_groups=_one_of("mesh_create_groups", "members", "world"),
        joint_groups=_one_of("mesh_joint_groups", "existing", "whole", "create"),
        check_mesh=config.mesh_check,
        plan=config.plan_redistribution,
    )
