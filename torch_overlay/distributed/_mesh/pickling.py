"""Pickled meshes: layout, ranks and names."""

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

# A group name that no process group has: funcol passes names on to C++, whose error
# then shows this one.
UNBOUND = "unbound: no process group here has ranks "
# The universe of a mesh that was saved by code that knew of none: any over its ranks
# that isn't private.
UNKNOWN = (0, None)

# Process groups can't be pickled, and the rest follows from the other attributes.
NOT_PICKLED = ("_in_universe", "_pg_registry", "_traced_views")


class RankAttribute:
    """An attribute in which a mesh says something of this rank. Most meshes have it in
    their ``__dict__``, which Python reads first, so that this is reached only by a mesh
    that was loaded early.

    One that was loaded where there was no world says what the saver's said, until there
    is a world. Then it, and one that was loaded before its groups were made, finds out
    on each request what holds here, and stores it once all is found.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, mesh: Any, owner: type) -> Any:
        if mesh is not None:
            # In this order: another thread that finds it out stores the attribute, and
            # then removes `_of_saver`.
            saver = mesh.__dict__.get("_of_saver")
            if self.name in mesh.__dict__:
                return mesh.__dict__[self.name]
            if saver is not None and self.name in saver.said:
                return (
                    bind_groups(mesh)[self.name]
                    if is_initialized()
                    else saver.said[self.name]
                )
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self.name!r}"
        )


def saved_state(mesh: DeviceMesh) -> dict[str, Any]:
    """What is pickled of a mesh: its attributes, without its state, its groups and its
    hash, but with the universe that it is of."""
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
        # no ranks or no layout, as a subclass that makes its own mesh may have it
        return state
    state["_rank_map"] = mesh._rank_map
    state["_flatten_rank_map"] = mesh._flatten_rank_map
    # Nothing here that differs from process to process: keys of compiled code are made
    # from it.
    state["_universe"] = saved_universe(shared)
    _say_whose(mesh, state)
    return state


def _say_whose(mesh: DeviceMesh, state: dict[str, Any]) -> None:
    """Add to the state of a view of `is_apart` whose group each axis has: the token of
    a view that shares it with no other, or None. On a rank outside that isn't known,
    and the view's own token stands for all, which finds no group that others share."""
    if not is_apart(mesh) or "_whose_groups" in state:
        return
    whose = {entry.group_name: entry.apart for entry in _entries()}
    own, names = (
        mesh.__dict__["_apart"],
        group_names(mesh) or [""] * len(view_of(mesh).layout.axes),
    )
    state["_whose_groups"] = [whose.get(name, own) if name else own for name in names]


def load_state(mesh: DeviceMesh, state: dict[str, Any]) -> None:
    """Fill a new mesh from a file; its root may still be empty here, so nothing is read
    through it.

    Files go both ways between this and versions before it. What belongs to the process
    that saved is not believed: the rank, the coordinates and the groups are those of
    the process that loads, as soon as there is a world. A group is found by its ranks,
    since names depend on the order in which a process made its groups; the name decides
    between several, and about groups that no mesh made.
    """
    mesh.__dict__.update(state)
    mesh.__dict__.setdefault("_universe", UNKNOWN)
    mesh._pg_registry = {}
    mesh._hash = None
    if "_coordinate_on_dim" not in state:  # xla meshes have neither rank nor groups
        return
    mesh._layout = loaded_layout(state["_layout"])  # overlay only
    mesh.__dict__.setdefault("_rank", -1)  # files of torch 2.10 have coordinates only
    saver = wait_for_world(mesh)
    if is_initialized():
        view = View(stored_ranks(state), from_torch(mesh._layout))
        mesh._rank = get_rank()
        mesh._coordinate_on_dim = view.coordinate(mesh._rank)
        _bind(mesh, view, saver, mesh.__dict__["_universe"])


def bind_groups(mesh: DeviceMesh) -> dict[str, Any]:
    """Find out who this rank is, and its group on each axis, and give what the mesh
    says of it. An axis without a group has a name that says so; all are looked for
    again once there may be others."""
    saver = mesh.__dict__.get("_of_saver")
    if saver is None:  # another thread found all
        return mesh.__dict__
    if saver.names is not None and saver.among == _groups_here():
        return {**mesh.__dict__, "_dim_group_names": saver.names}
    shared = shared_state(mesh)
    join_universe(shared)
    mesh._rank = get_rank()
    mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
    names = _bind(mesh, view_of(mesh), saver, (shared.saved_number, shared.private))
    shared.registry.update(mesh._pg_registry)
    return {**mesh.__dict__, "_dim_group_names": names}


def _bind(
    mesh: DeviceMesh, view: View, saver: SavedAttributes, saved_from: _SavedFrom
) -> list[str] | None:
    """The name of this rank's group on each axis, found by its ranks; none on a rank
    outside. While one is missing, its name starts with UNBOUND, and the names that the
    saver's groups had stay laid aside."""
    mesh._thread_id, mesh._hash = thread_id(), None
    saved = saver.said.get("_dim_group_names")
    if saved is None:
        mesh.__dict__.pop("_of_saver", None)
        return None
    here = _groups_here()
    names: list[str] = []
    for wanted in _wanted(mesh, view, saved):
        name = _find(wanted, view.rank_map, saved_from)
        names.append(name or f"{UNBOUND}{wanted.ranks}")
        group = find_group(name) if name else None
        if group is not None:
            mesh._pg_registry[group.group_name] = group
    if any(name.startswith(UNBOUND) for name in names):
        lay_aside(mesh, SavedAttributes({"_dim_group_names": saved}, names, here))
    else:
        mesh._dim_group_names = names
        mesh.__dict__.pop("_of_saver", None)
    return names


def _groups_here() -> tuple[Any, ...]:
    """Equal to what it was before only if an axis finds the same group as before: there
    are the same groups, and they serve as many axes."""
    groups = distributed_c10d._world.pg_names
    return (
        len(groups),
        weakref.ref(next(reversed(groups))),
        sum(len(entry.names) for entry in _entries()),
    )


def _entries() -> list[Entry]:
    """Of all universes of this world."""
    return [
        entry
        for universe in current_world().universes
        for entry in list(universe.table.entries.values())
    ]


class _Wanted(NamedTuple):
    """The group of an axis of a loaded mesh.

    Attributes:
        ranks: in the group's order, which is the mesh's.
        name: of the axis.
        saved_name: the name that the group had.
        apart: the token of the view that has the group alone, see `is_apart`; else
            None.
    """

    ranks: list[int]
    name: str
    saved_name: str
    apart: str | None


def _wanted(mesh: DeviceMesh, view: View, saved: list[str]) -> list[_Wanted]:
    """One for each axis; none on a rank outside."""
    if mesh._coordinate_on_dim is None:
        return []
    axes = view.layout.axes
    ranks = [view.show(_MeshLayout((axis,))).ranks(mesh._rank) for axis in axes]
    names = axis_names(mesh._mesh_dim_names, len(axes))
    saved = [*saved, *[""] * len(axes)]
    apart = mesh.__dict__.get(
        "_whose_groups", [mesh.__dict__.get("_apart")] * len(axes)
    )
    return [_Wanted(*each) for each in zip(ranks, names, saved, apart)]


def _find(wanted: _Wanted, rank_map: RankMap, saved_from: _SavedFrom) -> str | None:
    """The name of a group over exactly these ranks.

    If the universe that the mesh was saved from is here, it is that universe's, even if
    it was destroyed: who asks for it is told so. Else it is the first live one.
    """
    number, private = saved_from
    universe = find_universe(rank_map, private, number)
    if universe is not None and universe.number == number:
        name = _of_table(universe.table, wanted)
        if name is not None:
            return name
    return next(
        (name for name in _elsewhere(wanted, universe, saved_from) if find_group(name)),
        None,
    )


def _elsewhere(
    wanted: _Wanted, like: Universe | None, saved_from: _SavedFrom
) -> Iterator[str]:
    """The names of groups that may stand for the saver's, the likeliest first. Those of
    a private mesh, or of a view that has its own, see `is_apart`, are found where they
    were made alone:

    - groups that no table has, a user's or of a mesh that shares none: that of the
      saved name;
    - the default group;
    - the universe ``like`` the saved one, then the others that are as private: an axis
      of the same name;
    - groups that were made for a mesh and that no table has.
    """
    number, private = saved_from
    alone = private is not None or wanted.apart is not None
    world, known = current_world(), {entry.group_name for entry in _entries()}
    unknown = {
        name: text for name, text in _open(wanted.ranks).items() if name not in known
    }
    if wanted.saved_name in unknown:
        yield wanted.saved_name
    if not alone and wanted.ranks == list(range(get_world_size())):
        yield distributed_c10d._get_default_group().group_name
    tables = [
        universe.table
        for universe in (like, *world.universes)
        if universe and universe.private == private
    ]
    names = [name for table in tables if (name := _of_table(table, wanted))]
    # a window has no universe of its own
    if number is None and wanted.saved_name in names:
        yield wanted.saved_name
    yield from names
    if not alone:
        yield from (name for name, text in unknown.items() if text.startswith("mesh_"))


def _of_table(table: GroupTable, wanted: _Wanted) -> str | None:
    """The group over these ranks that serves an axis of this name; of several, the one
    of the saved name."""
    alike = [
        entry.group_name
        for key, entry in list(table.entries.items())
        if entry.serves_axis
        and wanted.name in entry.names
        and list(key.ranks) == wanted.ranks
        if entry.apart == wanted.apart
    ]
    return wanted.saved_name if wanted.saved_name in alike else next(iter(alike), None)


def _open(ranks: list[int]) -> dict[str, str]:
    """The descriptions of the groups over these ranks, by their names. One that a mesh
    made counts only in this order; a user's counts in any, since from_group takes a
    group as it is."""
    books, found = distributed_c10d._world, {}
    for group, name in books.pg_names.items():
        held, text = (
            list(books.pg_group_ranks.get(group, ())),
            getattr(group, "group_desc", ""),
        )
        if held == ranks or (
            sorted(held) == sorted(ranks) and not text.startswith("mesh_")
        ):
            found[name] = text
    return found
