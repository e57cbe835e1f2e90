"""Makes the meshes of `ParallelDims.build` by torch's mesh calls. A file of its own, since it imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .overlay import is_enabled


class Builder:
    """Makes meshes over all ranks of the job, by the names of their axes. Making one is collective over the world, as
    are `mesh` and `joined`.

    On stock torch every rank calls new_group for every group of an axis, also of an axis of one rank: on 8,192 ranks
    8,192 calls for nothing. So there only axes of several ranks are made by mesh calls, and all axes of one rank use
    one group of this rank alone.

    Args:
        device_type: of the meshes.
        sizes: the number of ranks on each axis, by name, and under "world" of all ranks.
        world_group: whether the meshes are views of a world mesh.
        backend: of the axes' groups; None for that of the default group.

    Attributes:
        world: the mesh of all ranks, of one axis; None without `world_group`.
        single: a group of this rank alone; None under the overlay, or if no axis has one rank.
    """

    def __init__(self, device_type: str, sizes: dict[str, int], world_group: bool, backend: str | None) -> None:
        self.device_type = device_type
        self.sizes = sizes
        self.backend = backend
        self.world: DeviceMesh | None = None
        if world_group:
            self.world = init_device_mesh(
                device_type, (sizes["world"],), mesh_dim_names=("world",), **self._on("world")
            )
        self.single: dist.ProcessGroup | None = None
        if 1 in sizes.values() and not is_enabled():
            # Each rank makes its own, so the others can't be asked to take part.
            self.single = dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)

    def mesh(self, names: tuple[str, ...]) -> DeviceMesh:
        """Make a mesh of all ranks with these axes, whose sizes multiply to the world's, the last counting first.
        Collective."""
        if self.single is None:
            return self._make(names)
        large_axes = tuple(name for name in names if self.sizes[name] > 1)
        large = self._make(large_axes) if large_axes else None
        groups = [large.get_group(name) if large is not None and name in large_axes else self.single for name in names]
        ranks = torch.arange(self.sizes["world"]).reshape(self._shape(names))
        return DeviceMesh.from_group(groups, self.device_type, ranks, mesh_dim_names=names)

    def joined(self, mesh: DeviceMesh, name: str) -> DeviceMesh:
        """Return all axes of a mesh, flattened to one of this name."""
        # On stock, flatten would make a group for each rank of the world, on all of them.
        if self.single is not None and mesh.size() == 1:
            return DeviceMesh.from_group(self.single, self.device_type, mesh_dim_names=(name,))
        return _call(mesh, "flatten")(name, **({} if self.backend is None else {"backend_override": self.backend}))

    def _make(self, names: tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of these axes by a mesh call: a view of the world mesh, if there is one."""
        # As views of the world, equal axes of different meshes share their groups under the overlay.
        if self.world is None:
            return init_device_mesh(self.device_type, self._shape(names), mesh_dim_names=names, **self._on(*names))
        return _call(self.world, "unflatten")(0, self._shape(names), names, **self._on(*names))

    def _shape(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Return the sizes of these axes."""
        return tuple(self.sizes[name] for name in names)

    def _on(self, *names: str) -> dict[str, Any]:
        """Return the keyword arguments that choose the backend of these axes; empty for the default."""
        return {} if self.backend is None else {"backend_override": dict.fromkeys(names, self.backend)}


def _call(mesh: DeviceMesh, name: str) -> Callable[..., DeviceMesh]:
    """Return a method of a mesh by its public name. Stock torch has it with an underscore."""
    return getattr(mesh, name, None) or getattr(mesh, f"_{name}")
