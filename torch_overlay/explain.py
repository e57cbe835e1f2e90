"""Explain a redistribution: torch's plan and the overlay's, step by step, with bytes, time and why.

    python -m torch_overlay explain --mesh 2,2,2 --shape 4096,4096 --dtype bf16 "P,S0,R" "R,S1,S0"

    torch_overlay.explain(dtensor, [Replicate(), Shard(1)])       # in a program; print what it returns

The module can be called, so that `torch_overlay.explain` is both the call and the room. Nothing communicates.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .choices import topology
from .distributed.tensor._planner.regions import NotOurs, Regions
from .show import words
from .show.placements import Placement, regions
from .show.question import Question, cost_of, groups_at_hand, laid_out

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from .show.explanation import Explanation

# Short names of dtypes, beside torch's own.
DTYPES = {
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


def explain(tensor: DTensor, placements: Sequence[Any] | str) -> Explanation:
    """What `tensor.redistribute(placements=placements)` would do, by torch and by the overlay. Nothing is sent.

    Args:
        tensor: a DTensor, or anything with its `_spec`.
        placements: torch's, one for each axis of the mesh, or words: ``"R,S1"``.

    Raises:
        TypeError: not a DTensor.
        ValueError: the placements don't fit the tensor or its mesh.
    """
    from .show.asked import of_tensor

    return of_tensor(tensor, placements)


class _Call(types.ModuleType):
    """This module, which is also the call."""

    def __call__(self, tensor: DTensor, placements: Sequence[Any] | str) -> Explanation:
        return explain(tensor, placements)


sys.modules[__name__].__class__ = _Call


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(
        prog="python -m torch_overlay explain",
        description="Torch's plan for a redistribution and the overlay's: steps, bytes, time and why.",
        epilog="Placements are words, one for each axis of the mesh: R, S0, S1, P (a sum), P(max), _S0(2) (strided).",
    )
    made.add_argument("source", help='the placements before, as "P,S0,R"')
    made.add_argument("target", help='the placements after, as "R,S1,S0"')
    made.add_argument("--mesh", required=True, metavar="SIZES", help="the sizes of the mesh's axes, as 2,2,2")
    made.add_argument("--shape", required=True, help="of the whole tensor, as 4096,4096")
    made.add_argument("--dtype", default="bf16", help="bf16, fp32, float8_e4m3fn, ... (default: bf16)")
    made.add_argument("--axes", metavar="NAMES", help="names of the mesh's axes, as dp,cp,tp (default: a,b,c)")
    made.add_argument("--permute", metavar="AXES", help="number the ranks along the axes in this order, slowest first")
    made.add_argument(
        "--flatten",
        choices=("whole", "existing", "create"),
        default="whole",
        help="the groups over several axes: one over all of them, only --flattened ones, or all sets (default: whole)",
    )
    made.add_argument(
        "--flattened", action="append", default=[], metavar="AXES", help="axes that the program flattened, as dp,cp"
    )
    made.add_argument("--topology", metavar="T", help="of axes: tp=450e9:2e-6,dp=50e9:1e-5 (bytes per second, seconds)")
    made.add_argument("--device", default="cuda", help="of the mesh; on cpu torch gathers where it can't exchange")
    made.add_argument("--draw", metavar="FILE.png", help="also draw who sends what to whom (needs matplotlib)")
    return made


def main(argv: Sequence[str]) -> int:
    """The command; its exit code."""
    arguments = parser().parse_args(argv)
    try:
        explanation = _explained(arguments)
        print(explanation)
        if arguments.draw:
            from .show.traffic_picture import draw

            draw(explanation, arguments.draw)
            print(f"drawn: {arguments.draw}")
    except (ValueError, ImportError, OSError) as error:
        print(f"torch_overlay explain: {error}", file=sys.stderr)
        return 2
    return 0


def _explained(arguments: argparse.Namespace) -> Explanation:
    from .show import asked

    sizes, names, order = words.mesh(arguments.mesh, arguments.axes, arguments.permute)
    flattened = [words.chosen(text, names, "--flattened") for text in arguments.flattened]
    dtype = asked.dtype_of(DTYPES.get(arguments.dtype, arguments.dtype))
    shape = words.integers(arguments.shape, "--shape", least=0)
    ends = [words.placements(text, len(sizes)) for text in (arguments.source, arguments.target)]
    read, refused = _regions(ends, shape, sizes)
    question = Question(
        words=(_spoken(arguments.source), _spoken(arguments.target)),
        shape=shape,
        sizes=sizes,
        source=read[0],
        target=read[1],
        refused=refused,
        names=names,
        ranks=laid_out(sizes, order),
        dtype=str(dtype).removeprefix("torch."),
        itemsize=dtype.itemsize,
        groups=groups_at_hand(arguments.flatten, sizes, flattened),
        cost=cost_of(names, topology("--topology", arguments.topology)),
    )
    return asked.of_words(question, ends, dtype, arguments.device, flattened)


def _regions(
    ends: list[tuple[Placement, ...]], shape: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[list[Regions | None], str]:
    try:
        return [regions(end, shape, sizes) for end in ends], ""
    except NotOurs as reason:
        return [None, None], str(reason)


def _spoken(text: str) -> str:
    return "·".join(word.strip() for word in text.split(","))
