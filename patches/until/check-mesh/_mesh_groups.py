"""Before ranks compare their meshes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._layout import MeshLayout
from ._mesh_state import axis_names, shared_state, view_of
from ._process_groups import Request, axis_group
from ._universe import universe_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from ._mesh_input import Override


def make_groups(
    mesh: DeviceMesh,
    layout: MeshLayout,
    names: Sequence[str] | None,
    overrides: Sequence[Override],
) -> list[str]:
    """The name of this rank's group on each axis of ``layout``, made where there is none; [] on a rank outside."""
    shared = shared_state(mesh)
    universe = universe_of(shared)
    found: list[str] = []
    for axis, name, override in zip(layout.axes, axis_names(names, len(layout.axes)), overrides, strict=True):
        view = view_of(mesh).show(MeshLayout((axis,)))
        group = axis_group(universe, Request(view, name, override, mesh._device_type))
        if group is not None:
            shared.registry[group.group_name] = group
            found.append(group.group_name)
    return found
