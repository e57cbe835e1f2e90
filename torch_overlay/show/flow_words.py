"""From words on a command line to who sends what to whom, from one mesh to another. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..transfers._planner.flow import Flow
from ..transfers._planner.reductions import Reduced, phases
from ..transfers._planner.routes import Move
from ..transfers._planner.sides import Ranks, Side
from .flow import FlowExplanation
from .placements import Placement, regions

End = tuple[Sequence[Placement], tuple[int, ...], tuple[int, ...]]  # placements, sizes and ranks of a mesh


def of_words(
    shape: tuple[int, ...], source: End, target: End, itemsize: int, tensors: int = 1, budget: int = 256 << 20
) -> FlowExplanation:
    """Explain for so many equal tensors. No process group is made.

    Raises:
        ValueError: a pending target, too few tensors, or too small a budget.
        NotPlanned: shards that are no boxes.

    >>> from .placements import Replicate, Shard
    >>> print(of_words((8, 8), ([Shard(0)], (2,), (0, 1)), ([Replicate()], (2,), (2, 3)), itemsize=4))
    1 tensor, 256 B, from ranks 0, 1 to ranks 2, 3
    torch: can't, from one mesh to another
    overlay: 1 exchange; 512 B in all; buffers of 256 B on a rank at most (budget
      256 MiB)
    <BLANKLINE>
    from\\to  0  1    2    3  sends
    0           ·  128  128    256
    1        ·     128  128    256
    2        ·  ·         ·      ·
    3        ·  ·    ·           ·
    gets     ·  ·  256  256
    <BLANKLINE>
    bytes that the rank of a row sends to the rank of a column
    """
    if tensors < 1:
        raise ValueError(f"--tensors needs 1 or more, got {tensors}")
    before, after = (regions(placements, shape, sizes) for placements, sizes, _ in (source, target))
    if after.pending:
        raise ValueError(f"a tensor can't get a pending reduction on another mesh; asked for {after}")
    ends = [Ranks.of(ranks, sizes) for _, sizes, ranks in (source, target)]
    moves = [Move(Side(before.without_pending(before.pending), ends[0]), Side(after, ends[1]), itemsize)] * tensors
    reduction = Reduced.apart(before) if before.pending else None
    flow = Flow.of(phases([reduction] * tensors, [itemsize] * tensors, budget), moves, [itemsize] * tensors, budget)
    size = tensors * math.prod(shape) * itemsize
    return FlowExplanation(tensors, size, tuple(sorted(ends[0].ranks)), tuple(sorted(ends[1].ranks)), flow, budget)
