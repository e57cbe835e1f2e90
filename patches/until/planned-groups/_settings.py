"""Before redistributions are planned."""

import dataclasses

from torch.distributed import config


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a user may choose about groups."""

    share_groups: str
    create: str
    flatten: str
    check_mesh: bool


def _one_of(name: str, *allowed: str) -> str:
    """The choice of this name in the configuration. Raises ValueError for any but these."""
    value = getattr(config, name)
    if value not in allowed:
        raise ValueError(f"torch.distributed.config.{name} is one of {', '.join(allowed)}, got {value!r}")
    return value


def get_settings() -> Settings:
    """The choices in force now; ask again at each use, since they change while meshes live."""
    return Settings(
        share_groups=_one_of("mesh_share_groups", "names", "ranks", "world", "off"),
        create=_one_of("mesh_create_groups", "members", "world"),
        flatten=_one_of("mesh_joint_groups", "existing", "whole", "create"),
        check_mesh=config.mesh_check,
    )
