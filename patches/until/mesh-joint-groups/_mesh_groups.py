"""Before groups over several axes are made: there are those of flattened views alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._mesh_group_names import group_names
from ._mesh_state import is_apart, shared_state, view_of
from ._settings import get_settings
from ._universe import current_world, join_universe, making_private

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ._group_kind import Kind
    from ._mesh_input import Override
    from ._mesh_layout import _FlatLayout
    from ._shared_state import SharedState

make_joint_groups = ...
_brings_joint = ...
_make_joint = ...
_large = ...


def make_own_groups(mesh: DeviceMesh, overrides: Sequence[Override]) -> None:
    """Give a new mesh the groups of its axes.

    If it is a root, made inside a block of `private_groups` and where groups are shared, its universe is private.
    """
    shared = shared_state(mesh)
    if making_private.get() and mesh._root_mesh is None and get_settings().share_groups != "off":
        shared.private = current_world().next_private(shared.rank_map)
    mesh._dim_group_names = make_groups(mesh, view_of(mesh).layout, mesh._mesh_dim_names, overrides)


def joint_group_name(mesh: DeviceMesh, axes: Sequence[int]) -> str | None:
    """The name of the group over several axes of a mesh, in whatever order it holds their ranks; None if there is none,
    and for a view of `is_apart`.

    All ranks of the mesh find the same group, or none, since it follows from the mesh calls of this universe: that of a
    view that somebody flattened, on the backend and with the options that the axes have. A rank outside finds none.
    """
    shared = shared_state(mesh)
    join_universe(shared)
    key = None if is_apart(mesh) else _joint_key(mesh, shared.universe, axes)
    return None if key is None else _flattened_group(shared, key)


def _flattened_group(shared: SharedState, key: tuple[_FlatLayout, Kind]) -> str | None:
    """The name of the group of a flattened view, that of the first name in order."""
    for _, flattened in sorted(shared.flattened.items(), key=lambda item: str(item[0])):
        names = group_names(flattened)
        if not names or names[0].startswith(UNBOUND) or is_apart(flattened):
            continue
        if _joint_key(flattened, shared.universe, (0,)) == key:
            return names[0]
    return None


def joint_groups_known(mesh: DeviceMesh) -> tuple[Any, ...]:
    """Part of every cache's key: it changes when `joint_group_name` may answer differently.

    Under the same name an equal mesh may have another flattened view, over other axes or with a group of its own. A
    view of `is_apart` has none, and a slice of it may be equal to one of the root mesh otherwise.
    """
    if is_apart(mesh):
        return ("apart",)
    flattened = list(shared_state(mesh).flattened.items())
    return tuple((name, *(group_names(view) or ())) for name, view in flattened)
