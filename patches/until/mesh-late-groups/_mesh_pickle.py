"""Before a loaded mesh looks for its groups again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import GroupName, _resolve_process_group, get_rank

from ._mesh_layout import _MeshLayout
from ._mesh_state import shared_state, thread_id, view_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ._view import View


class OfTheRank(...):
    """An attribute in which a mesh says something of this rank. Most meshes have it in their ``__dict__``, which Python
    reads first, so that this is reached only by a mesh that was loaded where there was no world.

    Such a mesh says what the saver's said, until there is a world. Then it finds out what holds here, and stores it.
    """


def bind_groups(mesh: DeviceMesh) -> dict[str, Any]:
    """Find out who this rank is, and its group on each axis, once there is a world, and give what the mesh says of
    it."""
    held = mesh.__dict__
    saved = held.get("_of_saver", held).get("_dim_group_names")
    mesh._rank, mesh._thread_id, mesh._hash = get_rank(), thread_id(), None
    mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
    found: dict[str, Any] = {"_rank": mesh._rank, "_coordinate_on_dim": mesh._coordinate_on_dim}
    if saved is None:
        held.pop("_of_saver", None)
        return found
    found["_dim_group_names"] = _bind(mesh, view_of(mesh), saved)
    shared_state(mesh).registry.update(mesh._pg_registry)
    return found


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
    mesh._dim_group_names = names
    mesh.__dict__.pop("_of_saver", None)
    return names
