"""A mesh as code meets it while torch traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def real_mesh(mesh: Any) -> DeviceMesh:
    """The mesh itself: while tracing, torch may hand over a wrapper, whose attributes aren't all the mesh's."""
    return getattr(mesh, "real_obj", mesh)
