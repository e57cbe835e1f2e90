"""Before a mesh brings a group over each set of axes."""

from torch.distributed import config


def get_settings() -> Settings:
    """The choices in force now."""
    return Settings(
        share_groups=_one_of("mesh_share_groups", "names", "ranks", "world", "off"),
        create_groups=_one_of("mesh_create_groups", "members", "world"),
        joint_groups=_one_of("mesh_joint_groups", "existing", "whole"),
        check_mesh=config.mesh_check,
    )
