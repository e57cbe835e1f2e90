"""Before redistributions are planned: nobody uses a group over several axes but who flattened them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def make_joint_groups(mesh: DeviceMesh) -> None:
    """None yet."""
