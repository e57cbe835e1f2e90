"""Before pickles say of which root mesh they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import get_rank, is_initialized

from ._mesh_state import shared_state, stored_ranks, thread_id, view_of, wait_for_world
from ._torch_layout import from_torch
from ._view import View

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

UNKNOWN = ...


def saved_state(mesh: DeviceMesh) -> dict[str, Any]:
    """What is pickled of a mesh: its attributes, without its state, its groups and its hash."""
    state = {name: value for name, value in mesh.__dict__.copy().items() if name not in NOT_PICKLED}
    state.update(state.pop("_of_saver", {}))
    state["_hash"] = None
    try:
        shared_state(mesh)
    except AttributeError:
        # no ranks or no layout, as a subclass that makes its own mesh may have it
        return state
    state["_rank_map"] = mesh._rank_map
    state["_flatten_rank_map"] = mesh._flatten_rank_map
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
    mesh._rank, mesh._thread_id, mesh._hash = get_rank(), thread_id(), None
    mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
    found: dict[str, Any] = {"_rank": mesh._rank, "_coordinate_on_dim": mesh._coordinate_on_dim}
    if saved is None:
        held.pop("_of_saver", None)
        return found
    found["_dim_group_names"] = _bind(mesh, view_of(mesh), saved)
    shared_state(mesh).registry.update(mesh._pg_registry)
    return found
