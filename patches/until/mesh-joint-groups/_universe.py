"""Before groups over several axes: a root mesh and its views have the groups of their axes alone."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ._group_table import GroupTable

if TYPE_CHECKING:
    from ._mesh_input import Override
    from ._rank_map import RankMap
    from ._shared_state import SharedState

Joint = ...


class Universe:
    """What a root mesh and all its views have in common of groups.

    Attributes:
        rank_map: of the root.
        number: counts the universes over this rank map in this world, the same on all its ranks.
        private: what tells a private universe from its equals; None if it isn't private.
        table: the groups that were made for its axes.
        overrides: the backend and options that were given, by the name of the group that was made with them.
        serial: differs from every other universe of this process.
    """

    def __init__(self, world: World, rank_map: RankMap, number: int, private: str | None) -> None:
        self.world = world
        self.rank_map = rank_map
        self.number = number
        self.private = private
        self.table = GroupTable()
        self.overrides: dict[str, Override] = {}
        self.serial = next(_serials)


class World(...):
    """What meshes left behind in one world, the same on every rank that made the same calls.

    Attributes:
        universes: in the order in which they were opened.
        table: the groups that all meshes share where mesh_share_groups is "world".
        compared: how many times ranks compared meshes (see `check_same_mesh`).
    """

    def __init__(self) -> None:
        self.universes: list[Universe] = []
        self.table = GroupTable()
        self.compared = 0
        self._private: Counter[RankMap] = Counter()
        self._opened: Counter[RankMap] = Counter()

    def open_universe(self, rank_map: RankMap, private: str | None) -> Universe:
        """One more universe over these ranks."""
        with _lock:
            self._opened[rank_map] += 1
            self.universes.append(Universe(self, rank_map, self._opened[rank_map], private))
            return self.universes[-1]


def universe_of(shared: SharedState) -> Universe:
    """The universe of a mesh in this world, opened at the first request for a group."""
    world = current_world()
    join_universe(shared)
    if shared.universe is None or shared.universe.world is not world:
        shared.universe = world.open_universe(shared.rank_map, shared.private)
    return shared.universe
