"""Before a mesh brings a group over each set of axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d

from ._group_makers import makes_communicators
from ._mesh_state import is_apart
from ._settings import get_settings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

sets_of_axes = ...


def make_joint_groups(mesh: DeviceMesh) -> None:
    """The group over all axes of a new mesh if `torch.distributed.config.mesh_joint_groups` asks for it; none of a
    view of `is_apart`."""
    large = _large(mesh)
    if len(large) > 1 and not is_apart(mesh) and _brings_joint():
        _make_joint(mesh, [large])


def _brings_joint() -> bool:
    """Whether a new mesh brings a group over all its axes. With sharing off it brings none: all views of a universe
    would share it. Nor does it where a group is a communicator, which takes memory as soon as it is made."""
    if get_settings().joint_groups == "existing" or get_settings().share_groups == "off":
        return False
    return not makes_communicators(distributed_c10d._get_default_group())
