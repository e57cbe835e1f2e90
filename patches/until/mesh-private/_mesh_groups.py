"""Before a mesh can be private."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._mesh_state import view_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from ._mesh_input import Override


def make_own_groups(mesh: DeviceMesh, overrides: Sequence[Override]) -> None:
    """Give a mesh the groups of its axes."""
    mesh._dim_group_names = make_groups(mesh, view_of(mesh).layout, mesh._mesh_dim_names, overrides)
