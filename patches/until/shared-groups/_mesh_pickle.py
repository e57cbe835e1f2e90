"""Before groups are shared: a loaded mesh finds its groups in torch's books."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import get_world_size, is_initialized

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup


def _find_group(ranks: list[int], saved_name: str) -> ProcessGroup | None:
    """A group over exactly these ranks, which torch sorts: the one of the saved name, else a mesh's."""
    if not is_initialized():
        return None
    if sorted(ranks) == list(range(get_world_size())):
        return distributed_c10d._get_default_group()
    world = distributed_c10d._world
    fitting = [group for group in world.pg_names if sorted(world.pg_group_ranks[group]) == sorted(ranks)]
    named = [group for group in fitting if world.pg_names.get(group) == saved_name]
    made_for_meshes = [group for group in fitting if getattr(group, "group_desc", "").startswith("mesh_")]
    return next(iter(named + made_for_meshes), None)
