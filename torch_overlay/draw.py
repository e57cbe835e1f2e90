"""Draw a mesh: its ranks, the hosts they sit on and each axis's groups, as a picture or in the terminal.

    python -m torch_overlay draw --mesh 2,4 --names dp,tp --out mesh.png
    python -m torch_overlay draw --degrees pp=2,dp_shard=4,tp=2,ep=4 --out run.png  # all meshes of a run

    torch_overlay.draw.mesh(mesh, "mesh.png", gpus_per_host=8)       # in a program
    print(torch_overlay.draw.text(mesh))

Nothing communicates, and the command needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .parallel_dims import ParallelMeshes
from .show import degrees_map, mesh_map, words
from .show.mesh_map import MeshMap
from .show.question import laid_out

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def mesh(mesh: DeviceMesh | ParallelMeshes | MeshMap, path: str, gpus_per_host: int = 8) -> None:
    """Write a picture of a mesh: a panel an axis, each rank in the colour of its group, hosts framed.

    Args:
        mesh: or all meshes of a run, as `ParallelDims.build` gives them; axes with the same groups share a panel.
        path: of the picture; its ending chooses the format.
        gpus_per_host: ranks are on hosts in their order, this many on each.

    Raises:
        ValueError: no GPU on a host, or more ranks than can be seen.
        ImportError: no matplotlib (`pip install torch-overlay[plot]`).
    """
    from .show.mesh_picture import draw

    draw(_map_of(mesh), path, _checked(gpus_per_host))


def text(mesh: DeviceMesh | ParallelMeshes | MeshMap, gpus_per_host: int = 8) -> str:
    """The same for the terminal: a line an axis, and a row of letters a host.

    >>> print(text(MeshMap.of(("dp", "tp"), (2, 2), range(4)), gpus_per_host=2))
    dp=2 x tp=2: 4 ranks on 2 hosts of 2
    <BLANKLINE>
    axis  size  groups  reaches        the groups' ranks
    dp       2       2  over 2 hosts   0, 2 | 1, 3
    tp       2       2  inside a host  0, 1 | 2, 3
    <BLANKLINE>
    ranks  dp  tp
    0, 1   ab  aa
    2, 3   ab  bb
    (a row a host, a letter a rank; ranks of one group have the same letter)
    """
    return mesh_map.text(_map_of(mesh), _checked(gpus_per_host))


def _map_of(mesh: DeviceMesh | ParallelMeshes | MeshMap) -> MeshMap:
    if isinstance(mesh, MeshMap):
        return mesh
    if isinstance(mesh, ParallelMeshes):
        return degrees_map.of_degrees(mesh.degrees)
    if not hasattr(mesh, "mesh_dim_names"):
        raise TypeError(f"draw needs a DeviceMesh, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names or words.names(None, mesh.ndim)
    return MeshMap.of(tuple(names), tuple(mesh.shape), mesh.mesh.flatten().tolist())


def _checked(gpus_per_host: int) -> int:
    if gpus_per_host < 1:
        raise ValueError(f"gpus_per_host must be at least 1, got {gpus_per_host}")
    return gpus_per_host


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(
        prog="python -m torch_overlay draw",
        description="A mesh in the terminal, and as a picture with --out: ranks, hosts, and each axis's groups.",
    )
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument("--mesh", metavar="SIZES", help="the sizes of the mesh's axes, as 2,4")
    what.add_argument("--degrees", metavar="NAME=N,...", help="all meshes of a run (parallel_dims), as pp=2,dp_shard=4")
    made.add_argument("--ranks", type=int, metavar="N", help="with --degrees: of the world, so that one can be -1")
    made.add_argument("--names", help="of the axes, as dp,tp (default: a,b,c)")
    made.add_argument("--permute", metavar="AXES", help="number the ranks along the axes in this order, slowest first")
    made.add_argument("--gpus-per-host", type=int, default=8, metavar="N", help="ranks on one host (default: 8)")
    made.add_argument("--out", metavar="FILE.png", help="write the picture there, too (needs matplotlib)")
    return made


def main(argv: Sequence[str]) -> int:
    """The command; its exit code."""
    arguments = parser().parse_args(argv)
    try:
        shown = _from_sizes(arguments) if arguments.degrees is None else _from_degrees(arguments)
        if arguments.out:  # first, so that a reader who stops reading still gets it
            mesh(shown, arguments.out, arguments.gpus_per_host)
        print(text(shown, arguments.gpus_per_host))
        if arguments.out:
            print(f"drawn: {arguments.out}")
    except (ValueError, ImportError, OSError) as error:
        print(f"torch_overlay draw: {error}", file=sys.stderr)
        return 2
    return 0


def _from_degrees(arguments: argparse.Namespace) -> MeshMap:
    if arguments.names or arguments.permute:
        raise ValueError("--names and --permute are for --mesh; the meshes of --degrees have theirs")
    return degrees_map.of_degrees(degrees_map.parse(arguments.degrees, arguments.ranks))


def _from_sizes(arguments: argparse.Namespace) -> MeshMap:
    if arguments.ranks is not None:
        raise ValueError("--ranks is for --degrees; --mesh has the ranks of its sizes")
    sizes, names, order = words.mesh(arguments.mesh, arguments.names, arguments.permute)
    return MeshMap.of(names, sizes, laid_out(sizes, order))
