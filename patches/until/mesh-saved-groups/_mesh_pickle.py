"""Before a loaded mesh looks for its groups in its universe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _resolve_process_group, get_rank, get_world_size, is_initialized

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
    view = View(stored_ranks(state), from_torch(state["_layout"]))
    if is_initialized():
        mesh._rank = get_rank()
        mesh._thread_id = thread_id()
    if "_rank" in mesh.__dict__:
        mesh._coordinate_on_dim = view.coordinate(mesh._rank)
    else:
        mesh._rank = -1  # files of releases before 2.11 have coordinates only; till there is a world it isn't known
    if not is_initialized():
        wait_for_world(mesh)
    elif "_dim_group_names" in state:
        _bind(mesh, view, state["_dim_group_names"])


def bind_groups(mesh: DeviceMesh) -> dict[str, Any]:
    """Find out who this rank is, and its group on each axis, anew, and give what the mesh says of it. An axis without a
    group has a name that says so, and is asked again."""
    held = mesh.__dict__
    saved = held.get("_of_saver", held).get("_dim_group_names")
    shared = shared_state(mesh)
    join_universe(shared)
    mesh._rank, mesh._thread_id, mesh._hash = get_rank(), thread_id(), None
    mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
    found = {"_rank": mesh._rank, "_coordinate_on_dim": mesh._coordinate_on_dim}
    if saved is None:
        held.pop("_of_saver", None)
        return found
    found["_dim_group_names"] = _bind(mesh, view_of(mesh), saved)
    shared.registry.update(mesh._pg_registry)
    return found


def _bind(mesh: DeviceMesh, view: View, saved: list[str]) -> list[str]:
    names: list[str] = []
    for wanted in _wanted(mesh, view, saved):
        name = _find(wanted)
        names.append(name or f"{UNBOUND}{wanted.ranks}")
        if name is not None:
            mesh._pg_registry[name] = _resolve_process_group(name)
    if any(name.startswith(UNBOUND) for name in names):
        lay_aside(mesh, {"_dim_group_names": saved})
    else:
        mesh._dim_group_names = names
        mesh.__dict__.pop("_of_saver", None)
    return names


class _Wanted(NamedTuple):
    """The group of an axis of a loaded mesh.

    Attributes:
        ranks: in the group's order.
        saved_name: the name that the group had.
    """

    ranks: list[int]
    saved_name: str


def _wanted(mesh: DeviceMesh, view: View, saved: list[str]) -> list[_Wanted]:
    """One for each axis; none on a rank outside."""
    if mesh._coordinate_on_dim is None:
        return []
    axes = view.layout.axes
    ranks = [_group_ranks(mesh, view.show(_MeshLayout((axis,)))) for axis in axes]
    saved = [*saved, *[""] * len(axes)]
    return [_Wanted(*each) for each in zip(ranks, saved)]


def _find(wanted: _Wanted) -> str | None:
    """The name of a live group over exactly these ranks in this order: that of the saved name, else the default group,
    else the first that was made for a mesh."""
    fitting = _open(wanted.ranks)
    if wanted.saved_name in fitting:
        return wanted.saved_name
    if wanted.ranks == list(range(get_world_size())):
        return distributed_c10d._get_default_group().group_name
    return next((name for name, text in fitting.items() if text.startswith("mesh_")), None)


_find_elsewhere = ...
_of_table = ...
