"""The commands that print something: `explain` a redistribution, `draw` a mesh, and the `status` of the overlay.

    python -m torch_overlay explain --mesh 2,2,2 --shape 4096,4096 --dtype bf16 "P,S0,R" "R,S1,S0"
    python -m torch_overlay draw --mesh dp=2,tp=4 --out mesh.png
    python -m torch_overlay draw --degrees pp=2,dp_shard=4,tp=2,ep=4 --out run.png  # all meshes of a run

In a program, `torch_overlay.explain`, `draw` and `status` do the same. Nothing communicates; `draw` needs no torch.
"""

from __future__ import annotations

import argparse
import ast
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .. import versions
from ..distributed.tensor._planner.cost import Cost
from ..distributed.tensor._planner.regions import NotPlanned
from ..errors import UnknownRelease
from ..series import PATCHES
from ..show import screen, typed
from ..show.drawing import Drawing, MeshMap, of_degrees
from ..show.shown_plan import groups_at_hand
from . import add_no_strict

if TYPE_CHECKING:
    from ..show.explanation import Explanation
    from ..show.flow import End, FlowExplanation

# Short names of dtypes. Torch's own names are accepted, too.
SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8": "float8_e4m3fn",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
}
# Torch's dtypes, of all releases: a mistyped one is reported before torch is imported, which takes seconds.
DTYPES = (
    "bcomplex32 bfloat16 bit bits16 bits1x8 bits2x4 bits4x2 bits8 bool cdouble cfloat chalf complex128 complex32 "
    "complex64 double float float16 float32 float4_e2m1fn_x2 float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu half int int1 int16 int2 int3 int32 int4 int5 int6 int64 int7 int8 long qint32 "
    "qint8 quint2x4 quint4x2 quint8 short uint1 uint16 uint2 uint3 uint32 uint4 uint5 uint6 uint64 uint7 uint8"
)

_PLACEMENTS = """Placements, one for each axis of the mesh, with commas between them:

  R       Replicate()          each rank of the axis holds the same
  S0      Shard(0)             the axis cuts dim 0
  P       Partial()            a term of a sum; P(max), P(avg), ... of others
  _S0(2)  _StridedShard(0, 2)  cuts dim 0 after later axes have cut it in 2

Examples:

  %(prog)s --mesh 2x4 --shape 4096x4096 S0,S1 R,S1
  %(prog)s --mesh dp=2,tp=4 --shape 64 S0,R R,R
  %(prog)s --mesh 2,2 --to-mesh 4 --shape 8,8 S0,R S0
"""


def add_explain(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --mesh MESH --shape SHAPE [OPTION...] FROM TO"
    parser.description = "The overlay's plan for a redistribution, step by step, with bytes, time and why."
    parser.epilog = _PLACEMENTS
    parser.add_argument("source", metavar="FROM", help='the placements before, as "P,S0,R"')
    parser.add_argument("target", metavar="TO", help='the placements after, as "R,S1,S0"')
    parser.add_argument("--mesh", required=True, help="the sizes of its axes: 2,2,2 or 2x2x2 or dp=2,tp=4")
    parser.add_argument("--axes", metavar="NAMES", help="names of the mesh's axes, as dp,cp,tp (default: a,b,c)")
    parser.add_argument(
        "--permute", metavar="AXES", help="number the ranks along the axes in this order, slowest first"
    )
    parser.add_argument("--shape", required=True, help="of the whole tensor: 4096,4096 or 4096x4096")
    parser.add_argument("--dtype", default="bf16", help="bf16, fp32, float8_e4m3fn, ... (default: bf16)")
    parser.add_argument(
        "--flatten",
        choices=("whole", "existing"),
        default="whole",
        metavar="GROUPS",
        help="the groups over several axes: one over all of them (whole, the default), or only the --flattened ones "
        "(existing)",
    )
    parser.add_argument(
        "--flattened", action="append", default=[], metavar="AXES", help="axes that the program flattened, as dp,cp"
    )
    other = parser.add_argument_group("to another mesh: who sends how much to whom")
    other.add_argument("--to-mesh", metavar="MESH", help="the sizes of its axes; TO are placements on it")
    other.add_argument("--ranks", help="of the mesh, in its order: 0-3 or 6,4,2,0 (default: from 0 on)")
    other.add_argument("--to-ranks", metavar="RANKS", help="of the other mesh (default: from 0 on)")
    other.add_argument("--tensors", type=int, metavar="N", help="how many such tensors there are (default: 1)")
    other.add_argument("--budget", type=int, metavar="BYTES", help="of buffers on a rank (default: 256 MiB)")
    parser.add_argument("--out", metavar="FILE.png", help="also draw who sends what to whom (needs matplotlib)")
    add_no_strict(parser)


def explain(arguments: argparse.Namespace) -> int:
    """Print the explanation, and write a picture with --out. Returns 0, or 2 after an error."""
    make = _explain_on_one_mesh if arguments.to_mesh is None else _explain_to_another_mesh
    return _print_and_save("explain", lambda: make(arguments), arguments.out)


def _explain_to_another_mesh(arguments: argparse.Namespace) -> FlowExplanation:
    shape = typed.parse_integers(arguments.shape, "--shape", least=0)
    meshes = (
        typed.parse_mesh(arguments.mesh, arguments.axes, arguments.permute),
        typed.parse_mesh(arguments.to_mesh, None, None),
    )
    source = _end(meshes[0], arguments.ranks, "--ranks", arguments.source, shape)
    target = _end(meshes[1], arguments.to_ranks, "--to-ranks", arguments.target, shape)
    name = dtype_name(arguments.dtype)

    from ..show import asked, flow  # imports torch, for the size of the dtype

    options = {name: getattr(arguments, name) for name in ("tensors", "budget") if getattr(arguments, name) is not None}
    try:
        return flow.of_words(shape, source, target, asked.dtype_of(name).itemsize, **options)
    except NotPlanned as reason:
        raise ValueError(str(reason)) from None


def _end(mesh: typed.Mesh, ranks: str | None, option: str, placements: str, shape: tuple[int, ...]) -> End:
    listed = typed.parse_ranks(ranks, math.prod(mesh.sizes), option)
    order = tuple([listed[position] for position in mesh.ranks])
    return typed.parse_placements(placements, len(mesh.sizes), len(shape)), mesh.sizes, order


def _explain_on_one_mesh(arguments: argparse.Namespace) -> Explanation:
    for option in ("ranks", "to_ranks", "tensors", "budget"):
        if getattr(arguments, option) is not None:
            raise ValueError(f"--{option.replace('_', '-')} is for --to-mesh")
    mesh = typed.parse_mesh(arguments.mesh, arguments.axes, arguments.permute)
    flattened = [typed.parse_axes(text, mesh.names, "--flattened") for text in arguments.flattened]
    shape = typed.parse_integers(arguments.shape, "--shape", least=0)
    texts = (arguments.source, arguments.target)
    ends = [typed.parse_placements(text, len(mesh.sizes), len(shape)) for text in texts]
    groups = groups_at_hand(arguments.flatten, mesh.sizes, flattened)
    name, cost = dtype_name(arguments.dtype), Cost()

    from ..show import asked  # imports torch, so only once the arguments are right

    by_user = frozenset(map(tuple, map(sorted, flattened)))
    return asked.of_words(ends, shape, asked.dtype_of(name), mesh, groups, cost, by_user)


def dtype_name(text: str) -> str:
    """Torch's name of a dtype, from that name or a short one.

    >>> dtype_name("bf16"), dtype_name("torch.float32")
    ('bfloat16', 'float32')
    """
    name = SHORT.get(text, text).removeprefix("torch.")
    if name not in DTYPES.split():
        raise ValueError(f"--dtype: torch has no dtype {text!r}; needed is one such as bf16 or float32")
    return name


_DRAWN = """Examples:

  %(prog)s --mesh dp=2,tp=4
  %(prog)s --degrees dp_shard=4,tp=2,ep=4 --out run.png
"""


def add_draw(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s (--mesh MESH | --degrees DEGREES) [OPTION...]"
    parser.description = (
        "A mesh in the terminal, and as a picture with --out: ranks, the hosts they sit on, and each axis's groups."
    )
    parser.epilog = _DRAWN
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--mesh", help="the sizes of its axes: 2,4 or 2x4 or dp=2,tp=4")
    what.add_argument("--degrees", help="all meshes of a run (parallel_dims), as pp=2,dp_shard=4")
    parser.add_argument("--axes", metavar="NAMES", help="names of the mesh's axes, as dp,tp (default: a,b,c)")
    parser.add_argument(
        "--permute", metavar="AXES", help="number the ranks along the axes in this order, slowest first"
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="with --degrees: of the world, so that one degree can be -1"
    )
    parser.add_argument("--gpus-per-host", type=int, default=8, metavar="N", help="ranks on one host (default: 8)")
    parser.add_argument("--out", metavar="FILE.png", help="write the picture there, too (needs matplotlib)")
    add_no_strict(parser)


def draw(arguments: argparse.Namespace) -> int:
    """Print the mesh, and write a picture with --out. Returns 0, or 2 if the mesh can't be drawn."""
    return _print_and_save("draw", lambda: _drawing(arguments), arguments.out)


def _drawing(arguments: argparse.Namespace) -> Drawing:
    if arguments.degrees is not None:
        if arguments.axes or arguments.permute:
            raise ValueError("--axes and --permute are for --mesh; the meshes of --degrees have theirs")
        return Drawing(of_degrees(typed.parse_degrees(arguments.degrees, arguments.ranks)), arguments.gpus_per_host)
    if arguments.ranks is not None:
        raise ValueError("--ranks is for --degrees; --mesh has the ranks of its sizes")
    mesh = typed.parse_mesh(arguments.mesh, arguments.axes, arguments.permute)
    return Drawing(MeshMap.of(mesh.names, mesh.sizes, mesh.ranks), arguments.gpus_per_host)


def _print_and_save(command: str, make: Callable[[], screen.Shown], out: str | None) -> int:
    """Print what `make` returns, and write its picture to the file `out`. Returns the exit code."""
    try:
        printed = make()
        if out:  # before printing, since `... | head` may end the process while it prints
            printed.save(out)
    except (ValueError, ImportError, OSError) as error:
        print(f"torch_overlay {command}: {error}", file=sys.stderr)
        return 2
    screen.show(printed.lines(screen.width()))
    if out:
        print(f"drawn: {out}")
    return 0


def add_status(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [OPTION...]"
    parser.description = (
        "Turn the overlay on in a process of its own and print in six lines what it did. Ends with 1 if a patch had to "
        "be left out."
    )
    parser.epilog = "A job asks in its own processes: print(torch_overlay.status()), or `run --report`."
    parser.add_argument("--all", action="store_true", help="print each patch, each count and each option")
    parser.add_argument("--release", metavar="X.Y", help="print what differs on this torch, installed or not")
    add_no_strict(parser)


def status(arguments: argparse.Namespace) -> int:
    """Print the status, with all that is recognised turned on; 1 if a patch was left out. With --release, print what
    differs on that torch, and return 2 if it isn't supported."""
    import torch_overlay

    if arguments.release is not None:
        return _release(arguments.release)
    try:
        now = torch_overlay.enable(strict=False)
    except Exception as error:  # the table says why in a line, where a traceback wouldn't help
        print(f"torch_overlay can't be enabled: {error}", file=sys.stderr)
        return 1
    is_whole = all(row.state != "left out" for row in now.rows)
    says = "is supported" if is_whole else "is supported in part"
    # Else "is on" reads as if it were about all programs in this environment.
    screen.show([f"This torch {says}. In the process of this command, which ends now:", ""])
    screen.show((now.all_lines if arguments.all else now.lines)(screen.width()))
    return int(not is_whole)


def _release(text: str) -> int:
    """Print the patches and branches of the code that this release gets and others don't, or the other way round."""
    try:
        release = versions.parse(text)
    except UnknownRelease as error:
        print(error, file=sys.stderr)
        return 2
    if not release.supported:
        print(versions.unsupported(release), file=sys.stderr)
        return 2
    rows = [row for row in PATCHES if row.releases]
    here, elsewhere = ([row for row in rows if release.in_range(row) == gets] for gets in (True, False))
    count = len(PATCHES) - len(rows) + len(here)
    lines = [f"torch {release.compared_with}: {count} patches, {len(here)} of them only on some releases"]
    for title, some in (("that some other releases don't get", here), ("that this release doesn't get", elsewhere)):
        lines += ["", f"Patches {title}:"]
        lines += [
            f"  {row.kind.name.lower():7} {row.qualname or row.module} (torch {row.releases}), "
            f"{row.body.removeprefix('torch_overlay.')}"
            for row in some
        ]
    lines += ["", "Branches of torch_overlay/distributed/_torch.py that run here:"]
    lines += [f"  {name}: RELEASE {bound}" for name, bound in _branches(release.number)] or ["  none"]
    print("\n".join(lines))
    return 0


def _branches(number: tuple[int, int, int]) -> Iterator[tuple[str, str]]:
    """The functions of `distributed/_torch.py` with a branch that this release takes, and its condition."""
    # Read and not imported: the release that is asked about needn't be installed.
    seam = ast.parse((pathlib.Path(__file__).parents[1] / "distributed" / "_torch.py").read_text(encoding="utf-8"))
    for function in [node for node in seam.body if isinstance(node, ast.FunctionDef)]:
        for node in ast.walk(function):
            if isinstance(node, ast.Compare) and ast.unparse(node.left) == "RELEASE":
                bound = ast.literal_eval(node.comparators[0])
                if (number < bound) == isinstance(node.ops[0], ast.Lt):
                    yield function.name, ast.unparse(node).removeprefix("RELEASE ")
