"""Before each group of a loaded mesh is found by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import get_world_size

from ._mesh_layout import _MeshLayout
from ._mesh_state import lay_aside
from ._view import View

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import ProcessGroup

_Wanted = ...
_wanted = ...
_group_ranks = ...
_find = ...


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
