"""Before groups are shared by default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import _resolve_process_group

from ._mesh_check import check_same_mesh
from ._mesh_layout import _MeshLayout
from ._mesh_state import axis_names, shared_state, view_of
from ._process_groups import Request, axis_group
from ._settings import get_settings
from ._universe import current_world, making_private, universe_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import GroupName

    from ._mesh_input import Override
    from ._mesh_layout import _FlatLayout


def make_own_groups(mesh: DeviceMesh, overrides: Sequence[Override]) -> None:
    """Give a new mesh the groups of its axes, and those that redistributions over several axes use.

    If it is a root, made inside a block of `private_groups` and where groups are shared, its universe is private.
    """
    shared = shared_state(mesh)
    if making_private.get() and mesh._root_mesh is None and get_settings().share_groups != "off":
        shared.private = current_world().next_private(shared.rank_map)
    mesh._dim_group_names = make_groups(mesh, view_of(mesh).layout, mesh._mesh_dim_names, overrides)
    make_joint_groups(mesh)


def _group_on(mesh: DeviceMesh, axis: _FlatLayout, name: str, override: Override) -> GroupName | None:
    """The name of this rank's new group on one axis; None on a rank outside."""
    ranks, ordered = shared_state(mesh).tensor, mesh._preserve_rank_order
    return mesh._init_one_process_group(axis, ranks, name, override, ordered)


def _make_each(
    mesh: DeviceMesh,
    layout: _MeshLayout,
    names: Sequence[str] | None,
    overrides: Sequence[Override],
) -> list[str]:
    """The name of this rank's new group on each axis of ``layout``; [] on a rank outside."""
    shared = shared_state(mesh)
    found: list[str] = []
    for axis, name, override in zip(layout.axes, axis_names(names, len(layout.axes)), overrides, strict=True):
        group = _group_on(mesh, axis, name, override)
        if group is not None:
            shared.registry[group] = _resolve_process_group(group)
            found.append(group)
    return found


def _find_or_make(
    mesh: DeviceMesh, layout: _MeshLayout, names: Sequence[str] | None, overrides: Sequence[Override]
) -> list[str]:
    check_same_mesh(lambda: _describe(mesh, layout, names, overrides))
    if get_settings().share_groups == "off":
        return _make_each(mesh, layout, names, overrides)
    shared = shared_state(mesh)
    universe = universe_of(shared)
    found: list[str] = []
    for axis, name, override in zip(layout.axes, axis_names(names, len(layout.axes)), overrides, strict=True):
        view = view_of(mesh).show(_MeshLayout((axis,)))
        group = axis_group(universe, Request(view, name, override, mesh._device_type))
        if group is not None:
            shared.registry[group.group_name] = group
            found.append(group.group_name)
    return found
