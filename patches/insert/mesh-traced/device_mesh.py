"""What dynamo may read of a mesh, what it runs when code is compiled, and what it guards."""

from __future__ import annotations


def _register_distributed_opaque_types():
    from torch.distributed import _mesh_traced

    {  # noqa: B018
        "_flatten": ...,
        "permute": MemberType.INLINED,
        "_trace_view": MemberType.USE_REAL,
        "_traced_views": MemberType.USE_REAL,
    }
    [obj._thread_id, *_mesh_traced.whose_views(obj)]
    _distributed_opaque_types_registered = ...
