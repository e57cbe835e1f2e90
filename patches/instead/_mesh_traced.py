"""Upstream a wrapped mesh is unwrapped by the function for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def real_mesh(mesh: Any) -> DeviceMesh:
    """The mesh itself: under tracing a wrapper may come, whose attributes aren't all the mesh's."""
    from torch._library.fake_class_registry import maybe_unwrap_fake_script_object

    return maybe_unwrap_fake_script_object(mesh)
