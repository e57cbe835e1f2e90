"""Before groups over several axes are destroyed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ._group_table import GroupTable

if TYPE_CHECKING:
    from ._rank_map import RankMap

_close_left = ...
_leave_with = ...


class World(...):
    """What meshes left behind in one world, the same on every rank that made the same calls.

    Attributes:
        universes: in the order in which they were opened; a pickle may name each.
        table: the groups that all meshes share where mesh_share_groups is "world".
        compared: how many times ranks compared meshes (see `check_same_mesh`).
    """

    def __init__(self) -> None:
        self.universes: list[Universe] = []
        self.table = GroupTable()
        self.compared = 0
        self._private: Counter[RankMap] = Counter()
        self._opened: Counter[RankMap] = Counter()
