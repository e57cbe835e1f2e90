"""Before groups are shared: each mesh asks torch for a group on each of its axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import _resolve_process_group

from ._mesh_state import shared_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import GroupName

    from ._mesh_input import Override
    from ._mesh_layout import _FlatLayout, _MeshLayout


def _group_on(mesh: DeviceMesh, axis: _FlatLayout, name: str, override: Override) -> GroupName | None:
    """The name of this rank's new group on one axis; None on a rank outside."""
    ranks, ordered = shared_state(mesh).tensor, mesh._preserve_rank_order
    return mesh._init_one_process_group(axis, ranks, name, override, ordered)


def make_groups(
    mesh: DeviceMesh,
    layout: _MeshLayout,
    names: Sequence[str] | None,
    overrides: Sequence[Override],
) -> list[str]:
    """The name of this rank's new group on each axis of ``layout``; [] on a rank outside."""
    shared = shared_state(mesh)
    found: list[str] = []
    for number, (axis, override) in enumerate(zip(layout.axes, overrides, strict=True)):
        name = names[number] if names else f"dim_{number}"
        group = _group_on(mesh, axis, name, override)
        if group is not None:
            shared.registry[group] = _resolve_process_group(group)
            found.append(group)
    return found
