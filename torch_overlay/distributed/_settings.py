"""The choices that the bodies read while they run: one frozen value, and the one place that holds the current one.

Checking values, reading the environment and explaining belong to whoever sets them; here they are taken as they come.
"""

import dataclasses

__all__ = ["DEFAULT", "Settings", "get_settings", "set_settings"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a user may choose about groups and redistribution.

    ``topology`` is one ``(axis name, bytes per second, seconds of latency)`` for each axis that the user described.
    """

    share_groups: str = "names"
    create: str = "members"
    flatten: str = "whole"
    check_mesh: bool = False
    cost: str = "stock"
    topology: tuple[tuple[str, float, float], ...] | None = None


DEFAULT = Settings()
_current = DEFAULT

# Which release this code belongs to, for people; ranks compare it. Whoever turns it on says so.
build = ""


def get_settings() -> Settings:
    """The settings in force now; ask again at each use, since they change while meshes live."""
    return _current


def set_settings(settings: Settings) -> Settings:
    """Put these in force for the whole process and return the ones before, for whoever puts them back."""
    global _current
    before, _current = _current, settings
    return before
