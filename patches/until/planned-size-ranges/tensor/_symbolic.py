"""Before tensors that don't share their plan have one for a range of sizes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ._planner.forms import is_multiple, rounded_parts, without_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence


def _guard_plan(trace: Trace, parts: Sequence[int]) -> None:
    """Ask for guards where other sizes, multiples of these parts, would have another plan.

    Multiples of `rounded` have the plan of their bytes rounded to a power of two, others that of their own bytes (see
    forms.py). So with more elements the plan may change, and change back at the next multiple. For example, (R, S0, S1)
    to (S1, R, R) on (2, 2, 2), whose plans cut evenly what is a multiple of (2, 4), and where multiples of (8, 8) are
    rounded: 64 x 3076 and 64 x 6148 have one plan, and 64 x 6144 between them that of 64 x 8192. So a trace for
    64 x 3072 is guarded on both sizes being multiples of 8, and on at most the elements of 120 x 3072, since 128 x 3072
    is rounded as 64 x 6144 is; one for 64 x 3076 on these sizes alone.
    """
    found = trace.found
    rounded = rounded_parts(found.before, found.after)
    if rounded is None or not _kinds_differ(trace, parts, rounded):
        _guard_elements(trace, parts)
    elif is_multiple(found.question.shape, rounded):
        for dim in _open_dims(trace.shape):
            _guard(trace.shape[dim] % rounded[dim] == 0)
        _guard_elements(trace, rounded)
    else:
        _guard_exact(trace)


_guard_kind = ...


def _guard_elements(trace: Trace, parts: Sequence[int]) -> None:
    """Ask for guards on the number of elements, where another number would have another plan.

    Among sizes of one kind, rounded or not, the plan depends on their product alone, so it is enough to vary the first;
    the others stay as traced. A size is counted in its parts. For example, 64 in parts of 4 is 16 of them: of 4, 8, ...
    64, 68, ... the last with the traced plan is found by bisection. The least sizes are one part each.

    Where shards become terms, the plan may change back with more elements: it is that of the traced sizes alone.
    """
    dims, plan = _open_dims(trace.shape), without_sizes(trace.found.steps)
    before, after = trace.found.before, trace.found.after
    if (after.pending - before.pending) & before.sharded:
        _guard_exact(trace)
        return
    parts = [parts[dim] for dim in dims]
    first, *others = [size // part for size, part in zip(trace.sizes, parts, strict=True)]

    def sizes(counts: Sequence[int]) -> list[int]:
        return [part * count for part, count in zip(parts, counts, strict=True)]

    def same(counts: Sequence[int]) -> bool:
        return trace.plan_of(sizes(counts)) == plan

    def last_same(bound: int) -> int:
        """The elements with as many parts of the first dim, towards this bound, as have the same plan."""
        count = _last_same(first, bound, lambda number: same((number, *others)))
        return math.prod(sizes((count, *others)))

    elements = math.prod([trace.shape[dim] for dim in dims])
    if not same([1] * len(dims)):
        _guard(elements >= last_same(0))
    first_far, *_ = trace.enlarged(trace.sizes, parts[0])
    if not same((first_far // parts[0], *others)):
        _guard(elements <= last_same(first_far // parts[0]))
