"""Pickling a mesh, and finding its rank and process groups again after loading.

Start at `saved_state` and `load_state`. A pickle holds layout, ranks and names, and
which universe the mesh is of. Process groups can't be pickled. So a loaded mesh looks
for existing groups over the ranks of its axes (`_find`), when it is loaded, or later if
there is no default group yet (`RankAttribute`, `bind_groups`).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import get_rank, get_world_size, is_initialized

from .._mesh_layout import _MeshLayout
from .._torch import from_torch, loaded_layout
from .rank_map import View
from .state import (
    SavedAttributes,
    axis_names,
    group_names,
    is_apart,
    lay_aside,
    saved_universe,
    shared_state,
    stored_ranks,
    take_back,
    thread_id,
    view_of,
    wait_for_world,
)
from .universe import current_world, find_group, find_universe, join_universe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from .rank_map import RankMap
    from .universe import Entry, GroupTable, Universe

    # The number of the universe that a mesh was saved from, and what makes it private;
    # see `saved_universe`.
    _SavedFrom = tuple[int | None, str | None]

# A group name for an axis without a group. No process group has it: functional
# collectives pass names on to C++, whose error message then shows this text.
UNBOUND = "unbound: no process group here has ranks "
# The universe of a mesh that was saved by code without universes. No universe has
# number 0, so any universe over its ranks that isn't private may serve.
UNKNOWN = (0, None)

# Process groups can't be pickled. The other two follow from the attributes that are.
NOT_PICKLED = ("_in_universe", "_pg_registry", "_traced_views")


class RankAttribute:
    """A descriptor for the attributes of a mesh that are about this rank: its number,
    its coordinates and its group names.

    Nearly every mesh has these attributes in its ``__dict__``, which Python reads
    first. The descriptor is only reached on a mesh that was loaded before its groups
    existed. As long as there is no default group, it answers with the values of the
    rank that saved the mesh. After that, each read looks for this rank's groups, until
    all are found and stored in ``__dict__``.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, mesh: Any, owner: type) -> Any:
        """Return the attribute for a mesh that doesn't have it in its ``__dict__``."""
        if mesh is not None:
            # Read `_of_saver` before the attribute: another thread that finds the
            # groups stores the attribute first, and then removes `_of_saver`.
            saved = mesh.__dict__.get("_of_saver")
            if self.name in mesh.__dict__:
                return mesh.__dict__[self.name]
            if saved is not None and self.name in saved.said:
                return (
                    bind_groups(mesh)[self.name]
                    if is_initialized()
                    else saved.said[self.name]
                )
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self.name!r}"
        )


def saved_state(mesh: DeviceMesh) -> dict[str, Any]:
    """The pickled state of a mesh and its universe, without groups and hash."""
    state = {
        name: value
        for name, value in mesh.__dict__.copy().items()
        if name not in NOT_PICKLED
    }
    take_back(state)
    state["_hash"] = None
    try:
        shared = shared_state(mesh)
    except AttributeError:
        # A subclass that skips __init__ may have no ranks or no layout yet.
        return state
    state["_rank_map"] = mesh._rank_map
    state["_flatten_rank_map"] = mesh._flatten_rank_map
    # Cache keys of compiled code are made from the pickle, so nothing may differ from
    # process to process.
    state["_universe"] = saved_universe(shared)
    _save_axis_tokens(mesh, state)
    return state


def _save_axis_tokens(mesh: DeviceMesh, state: dict[str, Any]) -> None:
    """For a view of `is_apart`, add the token of each axis; None if views share its
    group. A rank outside doesn't know that: it saves the view's own token for all axes,
    so that the loaded mesh takes no shared group."""
    if not is_apart(mesh) or "_whose_groups" in state:
        return
    tokens = {entry.group_name: entry.apart for entry in _all_entries()}
    view_token = mesh.__dict__["_apart"]
    names = group_names(mesh) or [""] * len(view_of(mesh).layout.axes)
    state["_whose_groups"] = [
        tokens.get(name, view_token) if name else view_token for name in names
    ]


def load_state(mesh: DeviceMesh, state: dict[str, Any]) -> None:
    """Fill a new mesh from its pickled state, also of older and newer versions.

    Rank, coordinates and groups are those of the process that loads, as soon as there
    is a default group. A group is found by its ranks, since names depend on the order
    in which a process created its groups. The saved name only decides between several
    groups over the same ranks, and about groups that no mesh made.
    """
    # In a pickle of both, the root of this mesh may still be empty here. So nothing
    # below reads through `_root_mesh`.
    mesh.__dict__.update(state)
    mesh.__dict__.setdefault("_universe", UNKNOWN)
    mesh._pg_registry = {}
    mesh._hash = None
    if "_coordinate_on_dim" not in state:  # an XLA mesh has neither rank nor groups
        return
    mesh._layout = loaded_layout(state["_layout"])  # overlay only
    mesh.__dict__.setdefault("_rank", -1)  # files of release 2.10 lack it
    saved = wait_for_world(mesh)
    if is_initialized():
        view = View(stored_ranks(state), from_torch(mesh._layout))
        mesh._rank = get_rank()
        mesh._coordinate_on_dim = view.coordinate(mesh._rank)
        _find_all_groups(mesh, view, saved, mesh.__dict__["_universe"])


def bind_groups(mesh: DeviceMesh) -> dict[str, Any]:
    """Find and store this rank and its group on each axis of a loaded mesh; returns the
    attributes with them. Needs a default group. An axis without a group gets a name
    that says so; all axes are looked up again once other groups exist."""
    saved = mesh.__dict__.get("_of_saver")
    if saved is None:  # another thread found them
        return mesh.__dict__
    # A look-up scans all groups of the process. It can't find more while there are the
    # same.
    if saved.names is not None and saved.among == _groups_here():
        return {**mesh.__dict__, "_dim_group_names": saved.names}
    shared = shared_state(mesh)
    join_universe(shared)
    mesh._rank = get_rank()
    mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
    names = _find_all_groups(
        mesh, view_of(mesh), saved, (shared.saved_number, shared.private)
    )
    shared.registry.update(mesh._pg_registry)
    return {**mesh.__dict__, "_dim_group_names": names}


def _find_all_groups(
    mesh: DeviceMesh, view: View, saved: SavedAttributes, saved_from: _SavedFrom
) -> list[str] | None:
    """The name of this rank's group on each axis, [] on a rank outside, None for a mesh
    that was saved without groups. If one isn't found, its name starts with UNBOUND, and
    the saved names are kept for the next look-up; else all are stored in the mesh."""
    mesh._thread_id, mesh._hash = thread_id(), None
    saved_names = saved.said.get("_dim_group_names")
    if saved_names is None:
        mesh.__dict__.pop("_of_saver", None)
        return None
    existing = _groups_here()
    names: list[str] = []
    for wanted in _wanted_groups(mesh, view, saved_names):
        name = _find(wanted, view.rank_map, saved_from)
        names.append(name or f"{UNBOUND}{wanted.ranks}")
        group = find_group(name) if name else None
        if group is not None:
            mesh._pg_registry[group.group_name] = group
    if any(name.startswith(UNBOUND) for name in names):
        lay_aside(
            mesh, SavedAttributes({"_dim_group_names": saved_names}, names, existing)
        )
    else:
        mesh._dim_group_names = names
        mesh.__dict__.pop("_of_saver", None)
    return names


def _groups_here() -> tuple[Any, ...]:
    """A value that changes when a look-up may find other groups. Needs a default
    group."""
    groups = distributed_c10d._world.pg_names
    # The number alone would miss one group destroyed and another created. The newest is
    # compared by weak reference, so that this keeps no group alive.
    return (
        len(groups),
        weakref.ref(next(reversed(groups))),
        sum(len(entry.names) for entry in _all_entries()),
    )


def _all_entries() -> list[Entry]:
    return [
        entry
        for universe in current_world().universes
        for entry in list(universe.table.entries.values())
    ]


class _WantedGroup(NamedTuple):
    """The group to find for one axis of a loaded mesh.

    Attributes:
        ranks: in the order of the mesh, which is that of the group.
        name: the name of the axis.
        saved_name: the name of the group in the process that saved the mesh.
        apart: the token of the view that alone has the group, see `is_apart`. None if
            views may share it.
    """

    ranks: list[int]
    name: str
    saved_name: str
    apart: str | None


def _wanted_groups(
    mesh: DeviceMesh, view: View, saved_names: list[str]
) -> list[_WantedGroup]:
    """The group to find for each axis; [] on a rank outside."""
    if mesh._coordinate_on_dim is None:
        return []
    axes = view.layout.axes
    ranks = [view.with_layout(_MeshLayout((axis,))).ranks(mesh._rank) for axis in axes]
    names = axis_names(mesh._mesh_dim_names, len(axes))
    # A mesh that was saved by a rank outside it holds no names.
    saved_names = [*saved_names, *[""] * len(axes)]
    apart = mesh.__dict__.get(
        "_whose_groups", [mesh.__dict__.get("_apart")] * len(axes)
    )
    return [_WantedGroup(*fields) for fields in zip(ranks, names, saved_names, apart)]


def _find(
    wanted: _WantedGroup, rank_map: RankMap, saved_from: _SavedFrom
) -> str | None:
    """The name of a group over exactly the wanted ranks; None if there is none. If the
    saved universe is here, its group is taken even if it was destroyed: whoever uses it
    gets an error that says so. Else the first living candidate is taken."""
    number, private = saved_from
    universe = find_universe(rank_map, private, number)
    if universe is not None and universe.number == number:
        name = _name_in_table(universe.table, wanted)
        if name is not None:
            return name
    return next(
        (
            name
            for name in _candidates(wanted, universe, saved_from)
            if find_group(name)
        ),
        None,
    )


def _candidates(
    wanted: _WantedGroup, like: Universe | None, saved_from: _SavedFrom
) -> Iterator[str]:
    """The names of groups that may replace the saved one, best first:

    1. A group of the saved name that is in no table: the user made it, or a mesh that
    shares no groups. 2. The default group. 3. A group of an axis of the same name, in
    the universe ``like`` the saved one, then in the others with the same privacy. 4. A
    group that a mesh made and that is in no table.

    For a private mesh and for a view of `is_apart`, 2 and 4 are left out: these groups
    may be shared.
    """
    number, private = saved_from
    is_private = private is not None or wanted.apart is not None
    world, in_tables = current_world(), {entry.group_name for entry in _all_entries()}
    not_in_tables = {
        name: description
        for name, description in _groups_over(wanted.ranks).items()
        if name not in in_tables
    }
    if wanted.saved_name in not_in_tables:
        yield wanted.saved_name
    if not is_private and wanted.ranks == list(range(get_world_size())):
        yield distributed_c10d._get_default_group().group_name
    tables = [
        universe.table
        for universe in (like, *world.universes)
        if universe and universe.private == private
    ]
    names = [name for table in tables if (name := _name_in_table(table, wanted))]
    # A window has no universe, so its groups are in the table of another one. Of
    # several axes of one name, the saved name is then the best hint.
    if number is None and wanted.saved_name in names:
        yield wanted.saved_name
    yield from names
    if not is_private:
        yield from (
            name
            for name, description in not_in_tables.items()
            if description.startswith("mesh_")
        )


def _name_in_table(table: GroupTable, wanted: _WantedGroup) -> str | None:
    """A group over the wanted ranks for the wanted axis name, rather the saved one."""
    names = [
        entry.group_name
        for key, entry in list(table.entries.items())
        if entry.serves_axis
        and wanted.name in entry.names
        and list(key.ranks) == wanted.ranks
        if entry.apart == wanted.apart
    ]
    return wanted.saved_name if wanted.saved_name in names else next(iter(names), None)


def _groups_over(ranks: list[int]) -> dict[str, str]:
    """Descriptions of the groups over these ranks, by name: meshes' in this order,
    users' in any, since from_group takes a group as it is."""
    world = distributed_c10d._world
    descriptions: dict[str, str] = {}
    for group, name in world.pg_names.items():
        group_ranks = list(world.pg_group_ranks.get(group, ()))
        description = getattr(group, "group_desc", "")
        if group_ranks == ranks or (
            sorted(group_ranks) == sorted(ranks) and not description.startswith("mesh_")
        ):
            descriptions[name] = description
    return descriptions
