"""What dynamo may read of a mesh, and what it runs when code is compiled."""

from __future__ import annotations


def _register_distributed_opaque_types():
    {  # noqa: B018
        "_flatten": ...,
        "permute": MemberType.INLINED,
        "_trace_view": MemberType.USE_REAL,
        "_traced_views": MemberType.USE_REAL,
    }
    _distributed_opaque_types_registered = ...
