"""Upstream's page lists the public methods with their docstrings, so these say all of it."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ._mesh_axes import dim_of
from ._mesh_traced import is_traced, traced_view


class _DeviceMesh(...):
    @staticmethod
    def concatenate(device_mesh_list: list[DeviceMesh]) -> DeviceMesh:
        """The axes of several views of one root mesh side by side, in the order given; no groups are made.

        Args:
            device_mesh_list: views that have no axis in common.

        Raises:
            ValueError: an empty list.
            RuntimeError: views of different ranks, axes that overlap, or names on some axes only.
        """
        if is_traced() and device_mesh_list:
            return device_mesh_list[0]._beside(device_mesh_list)
        return DeviceMesh._concatenate(device_mesh_list)

    def flatten(self: DeviceMesh, mesh_dim_name: str | None = None, backend_override: Any = None) -> DeviceMesh:
        """All axes as one. Makes its group, unless the root has this view already, so all ranks of the root mesh must
        call this, or all ranks of the world where members can't make groups alone.

        Args:
            mesh_dim_name: what the root and its views call it from then on; the names joined with "_" unless given.
            backend_override: the backend of its group, or options, or both.

        Raises:
            RuntimeError: a mesh whose axes have no names.
            ValueError: a name that an axis has, or a flattened view of other axes.
        """
        return self._flatten(mesh_dim_name, backend_override)

    def unflatten(
        self: DeviceMesh,
        dim: int | str,
        mesh_sizes: tuple[int, ...],
        mesh_dim_names: tuple[str, ...],
        backend_override: Any = None,
    ) -> DeviceMesh:
        """One axis as several. Makes their groups, so all ranks of the root mesh must call this (in compiled code:
        compile it), or all ranks of the world where members can't make groups alone.

        Args:
            dim: the axis, by number or name.
            mesh_sizes: of the new axes; their product is the size of the old one.
            mesh_dim_names: of the new axes.
            backend_override: the backends of their groups, or options, by number or name.

        Raises:
            RuntimeError: not one name for each size.
            ValueError: no such axis, sizes with another product, or a name that another axis has.
        """
        if is_traced():
            return traced_view(self, "unflatten", dim, mesh_sizes, mesh_dim_names, backend_override)
        return self._unflatten(dim_of(self, dim), mesh_sizes, mesh_dim_names, backend_override)
