"""Sizes that a compiler leaves open: one plan for all sizes of a kind, with guards that say of which.

The plan is that of the sizes for which the compiler traces. It serves all sizes for which the same dims are cut evenly,
as far as the cost model prefers it (see `_planner.forms`). The boxes are computed from the symbols.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.fx.experimental.symbolic_shapes import guard_or_false

from ._planner.forms import on_shape, plan_and_parts, shared_parts, step_on_shape, without_sizes
from ._planner.regions import NotPlanned
from ._planner.rounds import in_one_round
from ._program import Program, make_program
from ._question import SYMBOLIC, Question

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from ._planner.steps import Step

_FAR = 40  # up to 2**40 units are looked at


def only_reduces(source: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether all that happens is that reductions end: then the plan is the same for all sizes."""
    ends = zip(source.placements, target.placements, strict=True)
    same_order = source.shard_order == target.shard_order
    return same_order and all(old == new or (old.is_partial() and new.is_replicate()) for old, new in ends)


class Open(NamedTuple):
    """The sizes that are open.

    Attributes:
        dims: which.
        units: for each, what its sizes are counted in: the parts into which it is cut, or the mesh's size if it isn't.
        rest: for each, what remains beside whole units; the same for all sizes of a kind, see `_guard_kind`.
        counts: for each, the units of the size for which the compiler traces.
    """

    dims: tuple[int, ...]
    units: tuple[int, ...]
    rest: tuple[int, ...]
    counts: tuple[int, ...]

    def shape(self, traced: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
        """The traced shape with other sizes in place of those that are open."""
        sizes = list(traced)
        for dim, unit, rest, count in zip(self.dims, self.units, self.rest, counts, strict=True):
            sizes[dim] = unit * count + rest
        return tuple(sizes)


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

    def program_for(sizes: tuple[int, ...]) -> Program:
        return make_program(Question.of(mesh, source, target, sizes, dtype, async_op), mesh)

    found = program_for(traced)
    ends = found.before, found.after
    _, parts = plan_and_parts(*ends, dtype.itemsize, found.at_hand.joint, found.cost)
    shared = shared_parts(*ends, found.at_hand.joint, found.cost)
    open_dims = [dim for dim, size in enumerate(shape) if not isinstance(size, int)]
    for dim in open_dims:
        if parts[dim] > 1:
            _guard(shape[dim] % parts[dim] == 0)
        _guard(shape[dim] > 0)
    counted: Sequence[int] = parts
    if shared is not None and _kinds_differ(program_for, open_dims, traced, parts, shared):
        counted = _guard_kind(open_dims, shape, traced, parts, shared)
    units = tuple([counted[dim] if counted[dim] > 1 else math.prod(mesh.shape) for dim in open_dims])
    counts = [divmod(traced[dim], unit) for dim, unit in zip(open_dims, units, strict=True)]
    rest, here = tuple([rest for _, rest in counts]), tuple([count for count, _ in counts])
    _guard_numbers(found, program_for, Open(tuple(open_dims), units, rest, here), shape, traced)
    return _with_symbols(found, mesh, tuple([_multiple(size, parts[dim]) for dim, size in enumerate(shape)]))


def _kinds_differ(
    program_for: Callable[[tuple[int, ...]], Program],
    open_dims: Sequence[int],
    traced: tuple[int, ...],
    parts: Sequence[int],
    shared: Sequence[int],
) -> bool:
    """Whether the plan, apart from its rounds, depends on the size, or on whether the tensor shares it with others."""

    def plan_of(count: int, more: int) -> Sequence[Step]:
        sizes = list(traced)
        for dim in open_dims:
            sizes[dim] = count * math.lcm(parts[dim], shared[dim]) + more * parts[dim]
        return in_one_round(without_sizes(program_for(tuple(sizes)).steps))

    return len({tuple(plan_of(*size)) for size in ((1, 0), (0, 1), (1 << _FAR, 0), (1 << _FAR, 1))}) > 1


def _guard_kind(
    open_dims: Sequence[int], shape: Sequence[Any], traced: Sequence[int], parts: Sequence[int], shared: Sequence[int]
) -> Sequence[int]:
    """Ask for guards that tell sizes that share their plan from those that don't: between two sizes of one plan, one of
    the other kind may have another. Returns what the sizes of each dim are counted in."""
    units = [math.lcm(*pair) for pair in zip(parts, shared, strict=True)]
    odd = [dim for dim, size in enumerate(traced) if size % shared[dim]]
    if not odd:
        for dim in open_dims:
            if units[dim] > 1:
                _guard(shape[dim] % units[dim] == 0)
    elif all(dim in open_dims for dim in odd):  # else no size of the open ones makes the tensor share its plan
        _guard(shape[odd[0]] % shared[odd[0]] != 0)
    return units


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


def _guard_numbers(
    found: Program,
    program_for: Callable[[tuple[int, ...]], Program],
    sizes: Open,
    shape: Sequence[Any],
    traced: tuple[int, ...],
) -> None:
    """Ask for guards on the number of elements, where another number would have another plan."""
    form = without_sizes(found.steps)
    first, *others = sizes.counts

    def same(counts: Sequence[int]) -> bool:
        return without_sizes(program_for(sizes.shape(traced, counts)).steps) == form

    def elements(bound: int) -> int:
        """With as many units of the first dim, towards this bound, as have the same plan."""
        last = sizes.shape(traced, (_last_same(first, bound, lambda number: same((number, *others))), *others))
        return math.prod([last[dim] for dim in sizes.dims])

    count = math.prod([shape[dim] for dim in sizes.dims])
    if not same([0 if rest else 1 for rest in sizes.rest]):
        _guard(count >= elements(-1))
    if not same([1 << _FAR] * len(sizes.dims)):
        _guard(count <= elements(1 << _FAR))


def _last_same(here: int, there: int, same: Callable[[int], bool]) -> int:
    """From a number that is the same towards one that isn't: the last that is."""
    while abs(there - here) > 1:
        middle = (here + there) // 2
        here, there = (middle, there) if same(middle) else (here, middle)
    return here


def _guard(condition: Any) -> None:
    if not guard_or_false(condition):
        raise NotPlanned(SYMBOLIC)
