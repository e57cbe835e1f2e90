"""Before groups over several axes."""

import dataclasses

from torch.distributed import config


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a user may choose about groups."""

    share_groups: str
    create_groups: str
    check_mesh: bool


def get_settings() -> Settings:
    """The choices in force now."""
    return Settings(
        share_groups=_one_of("mesh_share_groups", "names", "ranks", "world", "off"),
        create_groups=_one_of("mesh_create_groups", "members", "world"),
        check_mesh=config.mesh_check,
    )
