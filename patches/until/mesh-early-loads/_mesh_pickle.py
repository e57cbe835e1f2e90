"""Before a mesh that was loaded early waits for a world."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import GroupName, _resolve_process_group, get_rank, is_initialized

from ._mesh_layout import _MeshLayout
from ._mesh_state import shared_state, stored_ranks, thread_id
from ._torch_layout import from_torch
from ._view import View

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def saved_state(mesh: DeviceMesh) -> dict[str, Any]:
    """What is pickled of a mesh: its attributes, without its state, its groups and its hash."""
    state = {name: value for name, value in mesh.__dict__.copy().items() if name not in NOT_PICKLED}
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

    Files go both ways between this and versions before it. What belongs to the process that saved is not believed
    where there is a world: the rank, the coordinates and the groups are those of the process that loads.
    """
    mesh.__dict__.update(state)
    mesh._pg_registry = {}
    mesh._hash = None
    if "_coordinate_on_dim" not in state or not is_initialized():  # xla meshes have neither rank nor groups
        return
    view = View(stored_ranks(state), from_torch(state["_layout"]))
    mesh._rank, mesh._thread_id = get_rank(), thread_id()
    mesh._coordinate_on_dim = view.coordinate(mesh._rank)
    if "_dim_group_names" in state:
        mesh._dim_group_names = _bind(mesh, view, state["_dim_group_names"])


def _bind(mesh: DeviceMesh, view: View, saved: list[str]) -> list[str]:
    """The name of this rank's group on each axis, found by its ranks, since names depend on the order in which a
    process made its groups; none on a rank outside."""
    names: list[str] = []
    for number, axis in enumerate(view.layout.axes if mesh._coordinate_on_dim is not None else ()):
        ranks = _group_ranks(mesh, view.show(_MeshLayout((axis,))))
        name = _find(ranks, saved[number] if saved else "")
        names.append(name or f"{UNBOUND}{ranks}")
        if name is not None:
            mesh._pg_registry[name] = _resolve_process_group(GroupName(name))
    return names
