"""Before groups over several axes are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._group_table import GroupTable

if TYPE_CHECKING:
    from ._mesh_input import Override
    from ._mesh_layout import _FlatLayout
    from ._rank_map import RankMap


class Universe(...):
    """What a root mesh and all its views have in common of groups.

    Attributes:
        rank_map: of the root.
        number: counts the universes over this rank map in this world, the same on all its ranks.
        private: what tells a private universe from its equals; None if it isn't private.
        table: the groups that were made for its axes.
        overrides: the backend and options that were given, by the name of the group that was made with them; on a
            rank outside by the name of the axis and its layout.
        serial: differs from every other universe of this process.
    """

    def __init__(self, world: World, rank_map: RankMap, number: int, private: str | None) -> None:
        self.world = world
        self.rank_map = rank_map
        self.number = number
        self.private = private
        self.table = GroupTable()
        self.overrides: dict[str | tuple[str, _FlatLayout], Override] = {}
        self.serial = next(_serials)
