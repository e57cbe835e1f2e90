"""What dynamo may read of a mesh."""

from __future__ import annotations


def _register_distributed_opaque_types():
    {  # noqa: B018
        "_flatten": ...,
        "submesh_at": MemberType.INLINED,
    }
    _distributed_opaque_types_registered = ...
