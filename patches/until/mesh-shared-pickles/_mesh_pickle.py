"""Before pickles say of which root mesh they are: a loaded mesh finds its groups in torch's books."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import get_rank, get_world_size, is_initialized

from ._mesh_layout import _MeshLayout
from ._mesh_state import lay_aside, shared_state, thread_id, view_of, wait_for_world
from ._rank_map import RankMap
from ._torch_layout import from_torch
from ._view import View

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import ProcessGroup


def saved_state(mesh: DeviceMesh) -> dict[str, Any]:
    """What is pickled of a mesh, without what is true only in this process."""
    shared = shared_state(mesh)
    state = {name: value for name, value in mesh.__dict__.items() if name not in ("_view", "_shared_state")}
    state.update(state.pop("_of_saver", {}))
    state.pop("_pg_registry", None)
    state["_rank_map"] = shared.tensor
    state["_flatten_rank_map"] = shared.ranks
    state["_hash"] = None
    return state


def load_state(mesh: DeviceMesh, state: dict[str, Any]) -> None:
    """Fill a new mesh from a file; its root may still be empty here, so nothing is read through it.

    Files go both ways between this and versions before it. What belongs to the process that saved is not believed: the
    rank, the coordinates and the groups are those of the process that loads, as soon as there is a world. A group is
    found by its ranks.
    """
    mesh.__dict__.update(state)
    mesh._pg_registry = {}
    mesh._hash = None
    if "_coordinate_on_dim" not in state:  # xla meshes have neither rank nor groups
        return
    view = View(RankMap(state["_flatten_rank_map"]), from_torch(state["_layout"]))
    if is_initialized():
        mesh._rank = get_rank()
        mesh._thread_id = thread_id()
    if "_rank" in mesh.__dict__:
        mesh._coordinate_on_dim = view.coordinate(mesh._rank)
    else:
        mesh._rank = -1  # files of releases before 2.11 have coordinates only
    if not is_initialized():
        wait_for_world(mesh)
    elif "_dim_group_names" in state:
        _bind(mesh, view, state["_dim_group_names"])


def bind_groups(mesh: DeviceMesh) -> dict[str, Any]:
    """Find out who this rank is, and its group on each axis, anew, and give what the mesh says of it. An axis without a
    group has a name that says so, and is asked again."""
    held = mesh.__dict__
    saved = held.get("_of_saver", held).get("_dim_group_names")
    mesh._rank, mesh._thread_id, mesh._hash = get_rank(), thread_id(), None
    mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
    found = {"_rank": mesh._rank, "_coordinate_on_dim": mesh._coordinate_on_dim}
    if saved is None:
        held.pop("_of_saver", None)
        return found
    found["_dim_group_names"] = _bind(mesh, view_of(mesh), saved)
    shared_state(mesh).registry.update(mesh._pg_registry)
    return found


def _bind(mesh: DeviceMesh, view: View, saved: list[str]) -> list[str]:
    """The name of this rank's group on each axis, found by its ranks, since names depend on the order in which a
    process made its groups; none on a rank outside."""
    axes = view.layout.axes if mesh._coordinate_on_dim is not None else ()
    wanted = [view.show(_MeshLayout((axis,))).ranks(mesh._rank) for axis in axes]
    if not mesh._preserve_rank_order:
        wanted = [sorted(ranks) for ranks in wanted]  # as new_group sorts them
    groups = [_open(ranks) for ranks in wanted]
    names = saved[: len(wanted)]
    # Either all names are this process's or none is: a number may be another mesh's here.
    if len(names) < len(wanted) or any(name not in found for name, found in zip(names, groups, strict=True)):
        names = [_of_a_mesh(ranks, found) or f"{UNBOUND}{ranks}" for ranks, found in zip(wanted, groups, strict=True)]
    mesh._pg_registry.update((name, found[name]) for name, found in zip(names, groups, strict=True) if name in found)
    if any(name.startswith(UNBOUND) for name in names):
        lay_aside(mesh, {"_dim_group_names": saved})
    else:
        mesh._dim_group_names = names
        mesh.__dict__.pop("_of_saver", None)
    return names


def _open(ranks: list[int]) -> dict[str, ProcessGroup]:
    """The open groups over these ranks in this order, by their names."""
    world = distributed_c10d._world
    return {name: group for group, name in world.pg_names.items() if list(world.pg_group_ranks[group]) == ranks}


def _of_a_mesh(ranks: list[int], groups: dict[str, ProcessGroup]) -> str | None:
    """The name of the default group, if it has these ranks, else of the first group that was made for a mesh."""
    if ranks == list(range(get_world_size())):
        return distributed_c10d._get_default_group().group_name
    descriptions = ((name, getattr(group, "group_desc", "")) for name, group in groups.items())
    return next((name for name, text in descriptions if text.startswith("mesh_")), None)
