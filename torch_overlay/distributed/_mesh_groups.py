"""The groups of a mesh's axes: made when the mesh is, found by name afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed import device_mesh
from torch.distributed.distributed_c10d import (
    ProcessGroup,
    _cleanup_process_group_global_state,
    _resolve_process_group,
)

from ._mesh_check import check_same_mesh
from ._mesh_pickle import UNBOUND, bind_groups
from ._mesh_state import shared_state, view_of
from ._process_groups import Request, axis_group
from ._rank_map import short

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from ._layout import MeshLayout
    from ._mesh_input import Override


def make_groups(
    mesh: DeviceMesh, layout: MeshLayout, names: Sequence[str] | None, overrides: Sequence[Override]
) -> list[str]:
    """The name of this rank's group on each axis of ``layout``, made where there is none; [] on a rank outside."""
    shared = shared_state(mesh)
    view = view_of(mesh).show(layout)
    check_same_mesh(_describe(mesh, layout, names, overrides))
    found: list[str] = []
    for number, (axis, override) in enumerate(zip(layout.axes, overrides, strict=True)):
        name = names[number] if names else f"dim_{number}"
        group = axis_group(Request(view, axis, name, override, mesh._device_type))
        if group is not None:
            shared.registry[group.group_name] = group
            found.append(group.group_name)
    return found


def _describe(mesh: DeviceMesh, layout: MeshLayout, names: Sequence[str] | None, overrides: Sequence[Override]) -> str:
    """One line about axes that are about to get groups: equal on two ranks exactly if they mean the same."""
    rank_map = view_of(mesh).rank_map
    axes = [f"{name}={size}" for name, size in zip(names, layout.sizes, strict=True)] if names else layout.sizes
    ranks = f"0 to {rank_map.numel - 1}"
    if not rank_map.is_identity:
        ranks = f"{short(rank_map.ranks())} #{rank_map.key[1][:8]}"
    asked = [f"{backend or ''}{'+options' if options else ''}" for backend, options in overrides]
    backends = f", backends {asked}" if any(asked) else ""
    strides = ", ".join(str(axis) for axis in layout.axes)
    return f"({', '.join(map(str, axes))}) on {mesh._device_type} over ranks {ranks} as {strides}{backends}"


def group_by_name(mesh: DeviceMesh, name: str, asked: Any, dim: int) -> ProcessGroup:
    """The group of this name. While torch traces, it comes from where torch wants it to come from.

    Raises:
        RuntimeError: a loaded mesh whose group doesn't exist in this process.
    """
    traced = getattr(device_mesh, "_maybe_traced_group", None)
    if traced is not None and not isinstance(asked, str):
        group = traced(mesh, dim)
        if group is not None:
            return group
    root = mesh._get_root_mesh()
    if name.startswith(UNBOUND):
        bind_groups(mesh)
        name = mesh._dim_group_names[dim]
        if name.startswith(UNBOUND):
            raise RuntimeError(
                f"This mesh was loaded, and no process group here has the ranks {name.removeprefix(UNBOUND)} of its "
                "axis. Build a mesh over these ranks first; the loaded one then finds its groups."
            )
        root._pg_registry[name] = _resolve_process_group(name)
    return device_mesh._get_pg_from_name(root, name)


def abort_groups(mesh: DeviceMesh) -> None:
    """Abort every group of a root mesh and its views, each once, and take them out of torch's books."""
    groups: dict[str, ProcessGroup] = {}
    for name in (*mesh.__dict__.get("_dim_group_names", ()), *mesh._pg_registry):
        try:
            groups[name] = _resolve_process_group(name)
        except RuntimeError:
            continue  # gone already
    for group in groups.values():
        group.abort()
    for group in groups.values():
        _cleanup_process_group_global_state(group)
    mesh._pg_registry.clear()
