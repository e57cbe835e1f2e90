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
    view of `is_apart`.

    With sharing off there is none, either: all views of a universe would share it.
    """
    policy, large = get_settings().joint_groups, _large(mesh)
    if policy == "existing" or get_settings().share_groups == "off" or len(large) < 2 or is_apart(mesh):
        return
    # A communicator takes memory as soon as it is made, unasked.
    if not makes_communicators(distributed_c10d._get_default_group()):
        _make_joint(mesh, [large])
