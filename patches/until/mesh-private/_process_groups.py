"""Before a mesh can be private."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d

from ._group_makers import members_create
from ._settings import get_settings

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup

    from ._group_table import GroupTable
    from ._universe import Universe


def axis_group(universe: Universe, request: Request) -> ProcessGroup | None:
    """The group of this rank along one axis: shared if it was made, else created; None on a rank outside the mesh.

    Collective: where the backend lets members create alone, the members call it; else every rank of the world does.

    Raises:
        RuntimeError: a member didn't take part within the timeout, or the group was made and then destroyed, where
            not only its members make it.
    """
    world = distributed_c10d._get_default_group()
    if _default_serves(world, request):
        return world
    alone = members_create(world, request.override[0])
    table, keys = _table(universe), _keys(request, _copies(request.view, alone))
    if alone:
        for key in keys:
            table.forget_gone(key)
    found = table.get_or_make(keys, lambda missing: new_groups(request, missing, alone))
    mine = next((entry for entry in found if entry.group_name), None)
    if mine is None:
        return None
    mine.users.add(universe.serial)
    return _named(mine, request)


def _default_serves(world: ProcessGroup, request: Request) -> bool:
    """Whether the axis gets the default group, as an axis does that is the whole world.

    Beside a gloo default group, a mesh of other devices than CPUs has a group of its own, as it had before. What the
    mesh is for decides, and not what this host has, which may differ from host to host.
    """
    if not _covers_world(request, world.size()):
        return False
    return request.device_type == "cpu" or distributed_c10d.get_backend(world) != "gloo"


def _table(universe: Universe) -> GroupTable:
    return universe.world.table if get_settings().share_groups == "world" else universe.table
