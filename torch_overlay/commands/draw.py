"""`python -m torch_overlay draw`: a mesh, its hosts and each axis's groups, in the terminal or as a picture.

    python -m torch_overlay draw --mesh dp=2,tp=4 --out mesh.png
    python -m torch_overlay draw --degrees pp=2,dp_shard=4,tp=2,ep=4 --out run.png  # all meshes of a run

In a program, `torch_overlay.draw` does the same for a mesh. Nothing communicates, and no torch is needed.
"""

from __future__ import annotations

import argparse

from ..show import typed
from ..show.drawing import Drawing, MeshMap, of_degrees
from .answer import answer
from .parser import Parser, add_no_strict, whole

_EXAMPLES = """Examples:

  %(prog)s --mesh dp=2,tp=4
  %(prog)s --degrees dp_shard=4,tp=2,ep=4 --out run.png
"""


def add_arguments(parser: Parser) -> None:
    """What it takes."""
    parser.usage = "%(prog)s (--mesh MESH | --degrees DEGREES) [OPTION...]"
    parser.description = (
        "A mesh in the terminal, and as a picture with --out: ranks, the hosts they sit on, and each axis's groups."
    )
    parser.epilog = _EXAMPLES
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--mesh", help="the sizes of its axes: 2,4 or 2x4 or dp=2,tp=4")
    what.add_argument("--degrees", help="all meshes of a run (parallel_dims), as pp=2,dp_shard=4")
    parser.add_argument("--axes", metavar="NAMES", help="names of the mesh's axes, as dp,tp (default: a,b,c)")
    parser.add_argument(
        "--permute", metavar="AXES", help="number the ranks along the axes in this order, slowest first"
    )
    parser.add_argument(
        "--ranks", type=whole, metavar="N", help="with --degrees: of the world, so that one degree can be -1"
    )
    parser.add_argument("--gpus-per-host", type=whole, default=8, metavar="N", help="ranks on one host (default: 8)")
    parser.add_argument("--out", metavar="FILE.png", help="write the picture there, too (needs matplotlib)")
    add_no_strict(parser)


def act(arguments: argparse.Namespace) -> int:
    """Print the mesh, and write the picture if it was asked for; 2 if it can't be drawn."""
    return answer("draw", lambda: _drawing(arguments), arguments.out)


def _drawing(arguments: argparse.Namespace) -> Drawing:
    shown = _from_sizes(arguments) if arguments.degrees is None else _from_degrees(arguments)
    return Drawing(shown, arguments.gpus_per_host)


def _from_degrees(arguments: argparse.Namespace) -> MeshMap:
    if arguments.axes or arguments.permute:
        raise ValueError("--axes and --permute are for --mesh; the meshes of --degrees have theirs")
    return of_degrees(typed.degrees(arguments.degrees, arguments.ranks))


def _from_sizes(arguments: argparse.Namespace) -> MeshMap:
    if arguments.ranks is not None:
        raise ValueError("--ranks is for --degrees; --mesh has the ranks of its sizes")
    mesh = typed.mesh(arguments.mesh, arguments.axes, arguments.permute)
    return MeshMap.of(mesh.names, mesh.sizes, mesh.ranks)
