"""The site of a redistribution: a mesh as one rank sees it, as a value, so that the mesh may go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .._mesh_group_names import group_names
from .._mesh_groups import joint_groups_known
from .._mesh_state import view_of
from .._settings import Settings, get_settings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .._view import View


class Site(NamedTuple):
    """Where a redistribution happens: a mesh as this rank sees it.

    Attributes:
        view: the mesh's layout over the ranks of its universe.
        names: of its axes, or None.
        coordinate: of this rank.
        groups: the names of this rank's groups, by axis.
        joint: which groups over several axes its universe has, see `joint_groups_known`.
        settings: the options in force.
    """

    view: View
    names: tuple[str, ...] | None
    coordinate: tuple[int, ...]
    groups: tuple[str, ...]
    joint: tuple[Any, ...]
    settings: Settings

    @staticmethod
    def of(mesh: DeviceMesh) -> Site:
        """Of a mesh that has groups and this rank."""
        return Site(
            view_of(mesh),
            mesh._mesh_dim_names,
            tuple(mesh._coordinate_on_dim or ()),
            tuple(group_names(mesh) or ()),
            joint_groups_known(mesh),
            get_settings(),
        )
