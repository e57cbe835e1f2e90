"""Before a mesh can be private."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ._group_table import GroupTable

if TYPE_CHECKING:
    from ._rank_map import RankMap
    from ._shared_state import SharedState

private_groups = ...
making_private = ...


class Universe(...):
    """What a root mesh and all its views have in common of groups.

    Attributes:
        rank_map: of the root.
        number: counts the universes over this rank map in this world, the same on all its ranks.
        table: the groups that were made for its axes.
        serial: differs from every other universe of this process.
    """

    def __init__(self, world: World, rank_map: RankMap, number: int) -> None:
        self.world = world
        self.rank_map = rank_map
        self.number = number
        self.table = GroupTable()
        self.serial = next(_serials)


class World(...):
    """What meshes left behind in one world, the same on every rank that made the same calls.

    Attributes:
        universes: in the order in which they were opened; a pickle may name each.
        table: the groups that all meshes share where mesh_share_groups is "world".
    """

    def __init__(self) -> None:
        self.universes: list[Universe] = []
        self.table = GroupTable()
        self._opened: Counter[RankMap] = Counter()

    def open_universe(self, rank_map: RankMap) -> Universe:
        """One more universe over these ranks."""
        with _lock:
            self._opened[rank_map] += 1
            self.universes.append(Universe(self, rank_map, self._opened[rank_map]))
            return self.universes[-1]

    next_private = ...


def universe_of(shared: SharedState) -> Universe:
    """The universe of a mesh in this world, opened at the first request for a group."""
    world = current_world()
    if shared.universe is None or shared.universe.world is not world:
        shared.universe = world.open_universe(shared.rank_map)
    return shared.universe
