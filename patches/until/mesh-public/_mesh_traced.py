"""Before compiled code gives a method other meshes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from ._mesh_group_names import group_names
from ._mesh_state import shared_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def keep_view(mesh: DeviceMesh, method: str, arguments: tuple[Any, ...]) -> str:
    """Make a view for compiled code and keep it with the universe; returns the name by which `_traced_views` has it.

    It is made once, however often the code is compiled.
    """
    traced = shared_state(mesh).traced
    said = f"{method}{arguments} of {mesh._stable_hash()} on {group_names(mesh)}"
    name = f"view_{hashlib.blake2b(said.encode(), digest_size=16).hexdigest()}"
    if not hasattr(traced, name):
        setattr(traced, name, getattr(mesh, method)(*arguments))
    return name


_said = ...
