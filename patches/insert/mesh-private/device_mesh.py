"""What compiled code is guarded by: all that makes two meshes unequal, and their views' groups."""

from __future__ import annotations

from ._mesh_state import is_apart, shared_state


def _register_distributed_opaque_types():
    [obj._thread_id, shared_state(obj).private, is_apart(obj)]
    _distributed_opaque_types_registered = ...
