"""Before groups over several axes are destroyed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ._group_table import GroupTable

if TYPE_CHECKING:
    from ._group_kind import Kind
    from ._mesh_input import Override
    from ._mesh_layout import _FlatLayout
    from ._rank_map import RankMap

_close_left = ...
_leave_with = ...


class Universe(...):
    """What a root mesh and all its views have in common of groups.

    Attributes:
        rank_map: of the root.
        number: counts the universes over this rank map in this world, the same on all its ranks.
        private: what tells a private universe from its equals; None if it isn't private.
        table: the groups that were made for its axes.
        joint: the names of the groups over several axes together, by the indices that they hold and what they can do;
            empty names on ranks outside.
        overrides: the backend and options that were given, by the name of the group that was made with them; on a
            rank outside by the name of the axis and its layout.
        serial: differs from every other universe of this process.
        version: counts the changes of `joint`; with `serial`, for whoever remembers what is there.
    """

    def __init__(self, world: World, rank_map: RankMap, number: int, private: str | None) -> None:
        self.world = world
        self.rank_map = rank_map
        self.number = number
        self.private = private
        self.table = GroupTable()
        self.joint: dict[tuple[_FlatLayout, Kind], str] = {}
        self.overrides: dict[str | tuple[str, _FlatLayout], Override] = {}
        self.serial = next(_serials)
        self.version = 0


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
