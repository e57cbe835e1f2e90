"""What compiled code is guarded by: all that makes two meshes unequal, and their views' groups."""

from __future__ import annotations


def _register_distributed_opaque_types():
    from torch.distributed import _mesh_state

    [obj._thread_id, *_mesh_state.whose_groups(obj)]
    _distributed_opaque_types_registered = ...
