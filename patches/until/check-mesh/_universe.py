"""Before ranks compare their meshes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ._group_table import GroupTable

if TYPE_CHECKING:
    from ._rank_map import RankMap


class World(...):
    """What meshes left behind in one world, the same on every rank that made the same calls.

    Attributes:
        universes: in the order in which they were opened; a pickle may name each.
        table: the groups that all meshes share where mesh_share_groups is "world".
    """

    def __init__(self) -> None:
        self.universes: list[Universe] = []
        self.table = GroupTable()
        self._private: Counter[RankMap] = Counter()
        self._opened: Counter[RankMap] = Counter()
