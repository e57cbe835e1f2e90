"""A mesh drawn, as a value: it prints as text, and `save` writes a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..parallel_dims import ParallelMeshes
from . import degrees_map, mesh_map, screen, typed
from .mesh_map import MeshMap

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Drawing:
    """A mesh, its hosts and each axis's groups. Print it.

    Attributes:
        mesh: what is drawn.
        gpus_per_host: ranks are on hosts in their order, this many on each.

    Raises ValueError without a GPU on a host.

    >>> print(Drawing(MeshMap.of(("dp", "tp"), (2, 2), range(4)), gpus_per_host=2))
    dp=2 x tp=2: 4 ranks on 2 hosts of 2
    <BLANKLINE>
    axis  size  groups  reaches        the groups' ranks
    dp       2       2  over 2 hosts   0, 2 | 1, 3
    tp       2       2  inside a host  0, 1 | 2, 3
    <BLANKLINE>
    ranks  dp  tp
    0, 1   ab  aa
    2, 3   ab  bb
    a row a host, a letter a rank; ranks of one group have the same letter
    """

    mesh: MeshMap
    gpus_per_host: int = 8

    def __post_init__(self) -> None:
        if self.gpus_per_host < 1:
            raise ValueError(f"gpus_per_host must be at least 1, got {self.gpus_per_host}")

    @staticmethod
    def of(mesh: DeviceMesh | ParallelMeshes | MeshMap, gpus_per_host: int = 8) -> Drawing:
        """Of a mesh, or of all meshes of a run, whose axes with the same groups are shown as one."""
        return Drawing(_map_of(mesh), gpus_per_host)

    def lines(self, width: int = screen.NARROW) -> list[str]:
        """The drawing for a terminal of this many columns."""
        return mesh_map.lines(self.mesh, self.gpus_per_host, width)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__

    def save(self, path: str) -> None:
        """Write a picture: a panel an axis, each rank in the colour of its group, hosts framed.

        Args:
            path: its ending chooses the format.

        Raises:
            ValueError: more ranks than can be seen.
            ImportError: no matplotlib (`pip install torch-overlay[plot]`).
        """
        from .mesh_picture import draw

        draw(self.mesh, path, self.gpus_per_host)


def _map_of(mesh: DeviceMesh | ParallelMeshes | MeshMap) -> MeshMap:
    if isinstance(mesh, MeshMap):
        return mesh
    if isinstance(mesh, ParallelMeshes):
        return degrees_map.of_degrees(mesh.degrees)
    if not hasattr(mesh, "mesh_dim_names"):
        raise TypeError(f"draw() needs a DeviceMesh, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names or typed.names(None, mesh.ndim)
    return MeshMap.of(tuple(names), tuple(mesh.shape), mesh.mesh.flatten().tolist())
