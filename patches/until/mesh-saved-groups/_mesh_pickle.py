"""Before a loaded mesh looks for its groups in its universe."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import (
    GroupName,
    _resolve_process_group,
    get_rank,
    get_world_size,
    is_initialized,
)

from ._mesh_layout import _MeshLayout
from ._mesh_state import lay_aside, shared_state, stored_ranks, thread_id, view_of, wait_for_world
from ._torch_layout import from_torch
from ._universe import join_universe
from ._view import View

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def load_state(mesh: DeviceMesh, state: dict[str, Any]) -> None:
    """Fill a new mesh from a file; its root may still be empty here, so nothing is read through it.

    Files go both ways between this and versions before it. What belongs to the process that saved is not believed: the
    rank, the coordinates and the groups are those of the process that loads, as soon as there is a world. A group is
    found by its ranks.
    """
    mesh.__dict__.update(state)
    mesh.__dict__.setdefault("_universe", UNKNOWN)
    mesh._pg_registry = {}
    mesh._hash = None
    if "_coordinate_on_dim" not in state:  # xla meshes have neither rank nor groups
        return
    if not is_initialized():
        mesh.__dict__.setdefault("_rank", -1)  # files of releases before 2.11 have coordinates only
        wait_for_world(mesh)
        return
    view = View(stored_ranks(state), from_torch(state["_layout"]))
    mesh._rank, mesh._thread_id = get_rank(), thread_id()
    mesh._coordinate_on_dim = view.coordinate(mesh._rank)
    if "_dim_group_names" in state:
        _bind(mesh, view, state["_dim_group_names"])


def bind_groups(mesh: DeviceMesh) -> dict[str, Any]:
    """Find out who this rank is, and its group on each axis, and give what the mesh says of it. An axis without a group
    has a name that says so; all are looked for again once there may be others."""
    held = mesh.__dict__
    said = held.get("_of_saver", held)
    if isinstance(said, PartlyFound) and said.among == _groups_here():
        return {"_dim_group_names": said.names}
    saved = said.get("_dim_group_names")
    shared = shared_state(mesh)
    join_universe(shared)
    mesh._rank, mesh._thread_id, mesh._hash = get_rank(), thread_id(), None
    mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
    found: dict[str, Any] = {"_rank": mesh._rank, "_coordinate_on_dim": mesh._coordinate_on_dim}
    if saved is None:
        held.pop("_of_saver", None)
        return found
    found["_dim_group_names"] = _bind(mesh, view_of(mesh), saved)
    shared.registry.update(mesh._pg_registry)
    return found


def _groups_here() -> tuple[Any, ...]:
    """Equal to what it was before only if there are the same groups as before."""
    groups = distributed_c10d._world.pg_names
    return len(groups), weakref.ref(next(reversed(groups)))


def _bind(mesh: DeviceMesh, view: View, saved: list[str]) -> list[str]:
    """The name of this rank's group on each axis, found by its ranks; none on a rank outside. While one is missing, its
    name starts with UNBOUND, and the names that the saver's groups had stay laid aside."""
    here = _groups_here()
    names: list[str] = []
    for number, axis in enumerate(view.layout.axes if mesh._coordinate_on_dim is not None else ()):
        ranks = _group_ranks(mesh, view.show(_MeshLayout((axis,))))
        name = _find(ranks, saved[number] if saved else "")
        names.append(name or f"{UNBOUND}{ranks}")
        if name is not None:
            mesh._pg_registry[name] = _resolve_process_group(GroupName(name))
    if any(name.startswith(UNBOUND) for name in names):
        lay_aside(mesh, PartlyFound(saved, names, here))
    else:
        mesh._dim_group_names = names
        mesh.__dict__.pop("_of_saver", None)
    return names


def _find(ranks: list[int], saved_name: str) -> str | None:
    """The name of a live group over exactly these ranks: that of the saved name, else, over the whole world in rank
    order, the default group, else the first that was made for a mesh.

    For example, rank 5 saved a mesh whose group along tp was "7", over ranks 4 to 7, and rank 10 loads it. Here no
    group "7" has the ranks 8 to 11, so this gives the first group of a mesh that has them.
    """
    fitting = _open(ranks)
    if saved_name in fitting:
        return saved_name
    if ranks == list(range(get_world_size())):
        return distributed_c10d._get_default_group().group_name
    return next((name for name, text in fitting.items() if text.startswith("mesh_")), None)


_Wanted = ...
_wanted = ...
_find_elsewhere = ...
_of_table = ...
