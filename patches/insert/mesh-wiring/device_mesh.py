"""The ranks in order take no memory; compiled code is guarded by all that makes two meshes unequal, and by their
views' groups."""

from __future__ import annotations

from ._mesh.rank_map import RankMap


def init_device_mesh():
    del rank_map
    rank_map = RankMap.identity(layout.numel())
    device_mesh = ...


def _register_distributed_opaque_types():
    from torch.distributed._mesh import state

    [obj._thread_id, obj._preserve_rank_order, *state.private_group_key(obj)]
    _distributed_opaque_types_registered = ...
