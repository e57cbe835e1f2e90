"""Before compiled code makes views at other coordinates, which are numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def traced_view(mesh: DeviceMesh, method: str, *arguments: Any) -> DeviceMesh:
    """What a method of the mesh gives, as an input of the graph: made once, when the code is compiled."""
    name = mesh._trace_view(method, *arguments)
    return getattr(mesh._get_root_mesh()._traced_views, name)


_fixed = ...
