"""What compiled code is guarded by: all that makes two meshes unequal."""

from __future__ import annotations


def _register_distributed_opaque_types():
    [obj._thread_id, obj._preserve_rank_order]  # noqa: B018
    _distributed_opaque_types_registered = ...
