"""Sizes that a compiler leaves open: one plan for many sizes, with guards that say for which.

The plan is that of the sizes for which the compiler traces. It is right for all sizes for which the same dims are cut
evenly, and the one that other ranks have for those that meet the guards below; the boxes are computed from the symbols.
For example, rows that become columns on four ranks: traced for 8 x 16, it is one all-to-all for all sizes that four
divides.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.fx.experimental.symbolic_shapes import guard_or_false

from .._planner.plan import in_one_round, on_shape, plan_and_parts, rounded_parts, step_on_shape, without_sizes
from .._planner.regions import NotPlanned
from .._planner.steps import AllToAll
from .program import Program, make_program, tell
from .question import SYMBOLIC, Question

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from .._planner.steps import Step


def only_reduces(source: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether all that happens is that reductions end: then the plan is all-reduces, which cut nothing."""
    ends = zip(source.placements, target.placements, strict=True)
    same_order = source.shard_order == target.shard_order
    return same_order and all(old == new or (old.is_partial() and new.is_replicate()) for old, new in ends)


def plan_open_sizes(
    mesh: DeviceMesh, dtype: torch.dtype, source: DTensorSpec, target: DTensorSpec, async_op: bool
) -> Program:
    """A program for all sizes that the trace may stand for; asks the compiler for guards.

    Raises:
        NotPlanned: a size that is cut isn't known to be a multiple, even with a guard; or there is no plan.
    """
    shape = source.shape
    traced = tuple([size if isinstance(size, int) else size.node.hint for size in shape])
    if None in traced or 0 in traced:
        raise NotPlanned(SYMBOLIC)
    found = make_program(Question.of(mesh, source, target, traced, dtype, async_op), mesh)
    _, parts = plan_and_parts(found.before, found.after, dtype.itemsize, found.at_hand.joint, found.cost)
    for dim in _open_dims(shape):
        if parts[dim] > 1:
            _guard(shape[dim] % parts[dim] == 0)
        _guard(shape[dim] > 0)
    _guard_plan(Trace(found, mesh, shape), parts)
    tell(found)
    return _with_symbols(found, mesh, tuple([_multiple(size, parts[dim]) for dim, size in enumerate(shape)]))


def _open_dims(shape: Sequence[Any]) -> list[int]:
    return [dim for dim, size in enumerate(shape) if not isinstance(size, int)]


def _guard(condition: Any) -> None:
    if not guard_or_false(condition):
        raise NotPlanned(SYMBOLIC)


def _multiple(size: Any, parts: int) -> Any:
    """The same size, as a multiple, so that what it is divided into needs no rounding."""
    return size if isinstance(size, int) or parts == 1 else parts * (size // parts)


def _with_symbols(found: Program, mesh: DeviceMesh, shape: tuple[Any, ...]) -> Program:
    """The same program for a tensor of this shape, ready to run."""
    before = on_shape(found.before, shape)
    program = dataclasses.replace(
        found,
        held=before.box(found.question.site.coordinate),
        before=before,
        after=on_shape(found.after, shape),
        steps=tuple([step_on_shape(step, shape) for step in found.steps]),
    )
    program.make_ready(mesh)
    return program


# --- which sizes have the plan of the traced ones ---

# The elements of a far tensor; larger ones are taken to have its plan. With many more, twelve digits of a plan's time
# (see cost.py) would lose a latency, and the plan would differ for nothing.
_FAR = 1 << 40


class Trace(NamedTuple):
    """The program of the sizes for which the compiler traces, its mesh, and the shape, with symbols."""

    found: Program
    mesh: DeviceMesh
    shape: Sequence[Any]

    @property
    def sizes(self) -> list[int]:
        """Those that are open, as traced."""
        return [self.found.question.shape[dim] for dim in _open_dims(self.shape)]

    def enlarged(self, sizes: Sequence[int], unit: int) -> list[int]:
        """These open sizes, the first by so many units larger that a tensor has about `_FAR` elements."""
        first, *others = sizes
        known = math.prod([size for size in self.shape if isinstance(size, int)])
        return [first + _FAR // (known * math.prod(others) * unit) * unit, *others]

    def plan_of(self, sizes: Sequence[int]) -> tuple[Step, ...]:
        """The steps of the plan for these open sizes, without sizes."""
        shape = list(self.found.question.shape)
        for dim, size in zip(_open_dims(self.shape), sizes, strict=True):
            shape[dim] = size
        return without_sizes(make_program(self.found.question._replace(shape=tuple(shape)), self.mesh).steps)


def _guard_plan(trace: Trace, parts: Sequence[int]) -> None:
    """Ask for guards where other sizes, multiples of these parts, would have another plan."""
    units, rounded = parts, rounded_parts(trace.found.before, trace.found.after)
    if rounded is not None and _kinds_differ(trace, parts, rounded):
        _guard_kind(trace, rounded)
        units = rounded
    _guard_elements(trace, parts, units)


def _kinds_differ(trace: Trace, parts: Sequence[int], rounded: Sequence[int]) -> bool:
    """Whether the open dims may have sizes of both kinds, rounded and not, and not all of these have one plan, apart
    from its rounds.

    The least and a far tensor of each kind are planned. If these have one plan, so have those between, see
    `_last_same`.
    """
    dims = _open_dims(trace.shape)
    known = [dim for dim, size in enumerate(trace.shape) if isinstance(size, int)]
    none_rounded = any(trace.shape[dim] % rounded[dim] for dim in known)
    # Always true where a reduction ends: there `plan_and_parts` counts all axes that take part.
    all_rounded = all(parts[dim] % rounded[dim] == 0 for dim in dims)
    if none_rounded or all_rounded:
        return False
    # Only moves are left. They cut a dim only by axes that cut it in source or target, so that `parts` divide `rounded`
    # and are the least sizes that aren't rounded. What is longer by a multiple of `rounded` is of the same kind.
    least = [[multiples[dim] for dim in dims] for multiples in (rounded, parts)]
    far = [trace.enlarged(sizes, rounded[dims[0]]) for sizes in least]
    # Where another number of rounds begins is for `_guard_elements`, for both kinds alike.
    plans = {in_one_round(trace.plan_of(sizes), AllToAll) for sizes in (*least, *far)}
    return len(plans) > 1


def _guard_kind(trace: Trace, rounded: Sequence[int]) -> None:
    """Ask for guards that only sizes of the traced kind meet.

    Multiples of `rounded` have the plan of their bytes rounded to a power of two, others that of their own bytes (see
    plan.py). So with more elements the plan may change, and change back at the next multiple. For example, (R, S0, S1)
    to (S1, R, R) on (2, 2, 2), whose plans cut evenly what is a multiple of (2, 4), and where multiples of (8, 8) are
    rounded: 64 x 3076 and 64 x 6148 have one plan, and 64 x 6144 between them that of 64 x 8192. So a trace for
    64 x 3072 is guarded on both sizes being multiples of 8, and on at most the elements of 120 x 3072, since 128 x 3072
    is rounded as 64 x 6144 is; one for 64 x 3076 on the second being no multiple.
    """
    dims, shape = _open_dims(trace.shape), trace.shape
    odd = [dim for dim in dims if trace.found.question.shape[dim] % rounded[dim]]
    if not odd:
        for dim in dims:
            _guard(shape[dim] % rounded[dim] == 0)
    else:
        _guard(shape[odd[0]] % rounded[odd[0]] != 0)


def _guard_elements(trace: Trace, parts: Sequence[int], units: Sequence[int]) -> None:
    """Ask for guards on the number of elements, where another number would have another plan.

    Among sizes of one kind the plan depends on their product alone, so it is enough to vary the first; the others stay
    as traced. A size is counted in its units. What remains beside whole units stays, so that all sizes that are looked
    at are of the traced kind. For example, 66 in units of 4 is 16 units and 2: of 2, 6, 10, ... 66, 70, ... the last
    with the traced plan is found by bisection. The least sizes of the kind are one unit each, or one part each where
    something remains.

    Where shards become terms, the plan may change back with more elements: it is that of the traced sizes alone.
    """
    dims, plan = _open_dims(trace.shape), without_sizes(trace.found.steps)
    before, after = trace.found.before, trace.found.after
    if (after.pending - before.pending) & before.sharded:
        _guard_exact(trace)
        return
    parts, units = ([many[dim] for dim in dims] for many in (parts, units))
    first, *others = [size // unit for size, unit in zip(trace.sizes, units, strict=True)]
    rest = [size % unit for size, unit in zip(trace.sizes, units, strict=True)]

    def sizes(counts: Sequence[int]) -> list[int]:
        return [unit * count + more for unit, count, more in zip(units, counts, rest, strict=True)]

    def same(lengths: Sequence[int]) -> bool:
        return trace.plan_of(lengths) == plan

    def last_same(bound: int) -> int:
        """The elements with as many units of the first dim, towards this bound, as have the same plan."""
        count = _last_same(first, bound, lambda number: same(sizes((number, *others))))
        return math.prod(sizes((count, *others)))

    elements = math.prod([trace.shape[dim] for dim in dims])
    if not same(parts if any(rest) else units):
        # where something remains, a count of 0 is a size, too: the first that is none is -1
        _guard(elements >= last_same(-1 if rest[0] else 0))
    far = trace.enlarged(trace.sizes, units[0])
    if not same(far):
        _guard(elements <= last_same(far[0] // units[0]))


def _guard_exact(trace: Trace) -> None:
    """Ask for guards that only the traced sizes meet."""
    for dim, size in zip(_open_dims(trace.shape), trace.sizes, strict=True):
        _guard(trace.shape[dim] == size)


def _last_same(here: int, there: int, same: Callable[[int], bool]) -> int:
    """From a number that is the same towards one that isn't: the last that is. By the cost model a plan that is the
    fastest for two sizes is so between them, and rounds only grow."""
    while abs(there - here) > 1:
        middle = (here + there) // 2
        here, there = (middle, there) if same(middle) else (here, middle)
    return here
