"""Before a mesh can be private."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._shared_state import SharedState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from ._mesh_layout import _MeshLayout

whose_groups = ...


def make_window(
    parent: DeviceMesh, layout: _MeshLayout, start: int, names: Sequence[str] | None, groups: Sequence[str] | None
) -> DeviceMesh:
    """The copy of ``layout`` at index ``start``, as a root of its own."""
    view = view_of(parent).window(layout, start)
    shared = SharedState(view.rank_map)
    mesh = _blank(parent, None, names)
    put_state(mesh, view, shared)
    mesh._flatten_mapping = shared.flattened
    mesh._pg_registry = shared.registry
    for name in groups or ():
        if name in shared_state(parent).registry:
            shared.registry[name] = shared_state(parent).registry[name]
    return _finish(mesh, parent, groups)
