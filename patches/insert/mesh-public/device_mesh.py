"""What dynamo may read of a mesh, and what it guards: a view that needs groups may be private."""

from __future__ import annotations


def _register_distributed_opaque_types():
    from torch.distributed import _universe

    {  # noqa: B018
        "_flatten": ...,
        "flatten": MemberType.INLINED,
        "unflatten": MemberType.INLINED,
        "concatenate": MemberType.INLINED,
        "_beside": MemberType.INLINED,
    }
    [obj._thread_id, _universe.making_private.get()]
    _distributed_opaque_types_registered = ...
