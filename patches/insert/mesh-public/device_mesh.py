"""What dynamo may read of a mesh, what it runs when code is compiled, and what it guards: a view that needs groups may
be private."""

from __future__ import annotations


def _register_distributed_opaque_types():
    from torch.distributed._mesh import caches, universe

    {  # noqa: B018
        "_flatten": ...,
        "permute": MemberType.INLINED,
        "submesh_at": MemberType.INLINED,
        "flatten": MemberType.INLINED,
        "unflatten": MemberType.INLINED,
        "concatenate": MemberType.INLINED,
        "_beside": MemberType.INLINED,
        "_trace_view": MemberType.USE_REAL,
        "_traced_views": MemberType.USE_REAL,
    }
    [obj._thread_id, *caches.compiled_group_key(obj), universe.making_private.get()]
    _distributed_opaque_types_registered = ...
