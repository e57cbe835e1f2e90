"""Before meshes can be compared."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a user may choose about groups."""

    share_groups: str = "names"
    create: str = "members"
