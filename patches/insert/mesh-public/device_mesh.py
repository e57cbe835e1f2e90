"""What dynamo may read of a mesh."""

from __future__ import annotations


def _register_distributed_opaque_types():
    {  # noqa: B018
        "_flatten": ...,
        "flatten": MemberType.INLINED,
        "unflatten": MemberType.INLINED,
        "_beside": MemberType.INLINED,
    }
    _distributed_opaque_types_registered = ...
