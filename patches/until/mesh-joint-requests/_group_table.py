"""Before groups over several axes are made."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Entry(...):
    """A group that was made.

    Attributes:
        group_name: by which c10d finds it; empty on a rank that isn't in it.
        names: of the axes that it serves, in the order in which they asked.
        users: the serials of the universes that they belong to.
        apart: the token of the view of `is_apart` that has the group alone, empty until the view is made; else None.
    """

    group_name: str
    names: list[str] = field(default_factory=list)
    users: set[int] = field(default_factory=set)
    serves_axis = ...
