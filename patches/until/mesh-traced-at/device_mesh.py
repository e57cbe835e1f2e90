"""Before compiled code makes views at other coordinates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import get_rank, is_initialized

from ._mesh_apart import mark_slice
from ._mesh_axes import select, select_groups, start_at
from ._mesh_state import make_window, view_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh


class _DeviceMesh(...):
    def submesh_at(self: DeviceMesh, mesh_dim_names: str | tuple[str, ...], at: Mapping[str, int]) -> DeviceMesh:
        """The view of some axes as it is at given coordinates of the others, in constant time.

        Args:
            mesh_dim_names: the axes to show.
            at: the coordinate on other axes of the mesh; this rank's own where not given, 0 on a rank outside the mesh.

        Returns:
            A root mesh of its own; its groups are there on the ranks that it holds.

        Raises:
            KeyError: a name that the mesh doesn't have.
            ValueError: an axis shown twice or both shown and fixed, be it inside a flattened view, or a coordinate
                outside its axis.

        >>> mesh.submesh_at("shard", at={"replicate": 1})  # what another replica's ranks see  # doctest: +SKIP
        """
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        layout, own = select(self, names), select_groups(self, names)
        start = start_at(self, names, layout, at)
        view = view_of(self).window(layout, start)
        inside = is_initialized() and view.rank_map.index(get_rank()) is not None
        own = own if inside or own is None else []
        return mark_slice(make_window(self, layout, start, names, own), self, names)
