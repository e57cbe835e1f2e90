"""Before a loaded view finds the groups that it shares with no other."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import get_world_size

from ._group_table import find_group
from ._mesh_layout import _MeshLayout
from ._mesh_state import axis_names
from ._universe import current_world
from ._view import View

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ._group_table import GroupTable
    from ._universe import Universe

_say_whose = ...


class _Wanted(NamedTuple):
    """The group of an axis of a loaded mesh.

    Attributes:
        ranks: in the group's order.
        lane: the name of the axis.
        saved_name: the name that the group had.
    """

    ranks: list[int]
    lane: str
    saved_name: str


def _wanted(mesh: DeviceMesh, view: View, saved: list[str]) -> list[_Wanted]:
    """One for each axis; none on a rank outside."""
    if mesh._coordinate_on_dim is None:
        return []
    axes = view.layout.axes
    ranks = [_group_ranks(mesh, view.show(_MeshLayout((axis,)))) for axis in axes]
    lanes = axis_names(mesh._mesh_dim_names, len(axes))
    saved = [*saved, *[""] * len(axes)]
    return [_Wanted(*each) for each in zip(ranks, lanes, saved)]


def _find_elsewhere(wanted: _Wanted, like: Universe | None, number: int | None, private: str | None) -> str | None:
    """The name of a live group, from the first of these that has one:

    - groups that no table has, a user's or of a mesh that shares none: that of the saved name;
    - of a mesh that isn't private: the default group;
    - the universe ``like`` the saved one, then the others that are as private: an axis of the same name;
    - of a mesh that isn't private: groups that were made for a mesh and that no table has.
    """
    world = current_world()
    tables = [*(universe.table for universe in world.universes), world.table]
    known = {entry.group_name for table in tables for entry in list(table.entries.values())}
    others = {name: text for name, text in _open(wanted.ranks).items() if name not in known}
    if wanted.saved_name in others:
        return wanted.saved_name
    if private is None and wanted.ranks == list(range(get_world_size())):
        return distributed_c10d._get_default_group().group_name
    tables = [universe.table for universe in (like, *world.universes) if universe and universe.private == private]
    tables += [world.table] if private is None else []
    names = [name for table in tables if (name := _of_table(table, wanted)) and find_group(name)]
    if number is None and wanted.saved_name in names:  # a window has no universe of its own
        return wanted.saved_name
    made_for_meshes = [name for name, text in others.items() if text.startswith("mesh_") and private is None]
    return next(iter([*names, *made_for_meshes]), None)


def _of_table(table: GroupTable, wanted: _Wanted) -> str | None:
    """The group over these ranks that serves an axis of this name; of several, the one of the saved name."""
    alike = [
        entry.group_name
        for key, entry in list(table.entries.items())
        if wanted.lane in entry.names and list(key.ranks) == wanted.ranks
    ]
    return wanted.saved_name if wanted.saved_name in alike else next(iter(alike), None)
