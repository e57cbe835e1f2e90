"""Before redistributions are planned."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a user may choose about groups."""

    share_groups: str = "names"
    create: str = "members"
    check_mesh: bool = False
