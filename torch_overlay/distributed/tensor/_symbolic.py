"""Sizes that a compiler leaves open: one plan for all sizes of a kind, with guards that say of which.

The plan is that of the sizes for which the compiler traces. It serves all that are multiples of the mesh's size, as
far as the cost model prefers it: where every cut is even, what a plan costs is a line over the number of elements, so
that a plan that is the best for two numbers is the best for all between them. Its boxes are computed from the symbols.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from torch.fx.experimental.symbolic_shapes import guard_or_false

from ._planner.regions import NotOurs
from ._planner.steps import Divide, Step
from ._program import Program, make_program
from ._question import SYMBOLIC, Question

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

_FAR = 40  # sizes of up to 2**40 times the mesh's are looked at


def is_symbolic(shape: Sequence[object]) -> bool:
    """Whether a size isn't known."""
    return bool({*map(type, shape)} - {int})


def only_reduces(source: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether all that happens is that reductions end: then the plan is the same for all sizes."""
    ends = zip(source.placements, target.placements, strict=True)
    same_order = source.shard_order == target.shard_order
    return same_order and all(old == new or (old.is_partial() and new.is_replicate()) for old, new in ends)


def plan_open_sizes(
    mesh: DeviceMesh, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, async_op: bool
) -> Program:
    """A program for all sizes that the trace may stand for; asks the compiler for guards.

    Raises:
        NotOurs: a size isn't known to be a multiple, even with a guard; or there is no plan.
    """
    ranks = math.prod(mesh.shape)
    shape = source.shape
    open_dims = [dim for dim, size in enumerate(shape) if not isinstance(size, int)]
    if not all(guard_or_false(shape[dim] % ranks == 0) and guard_or_false(shape[dim] > 0) for dim in open_dims):
        raise NotOurs(SYMBOLIC)
    traced = tuple(size if isinstance(size, int) else size.node.hint for size in shape)
    if None in traced:
        raise NotOurs(SYMBOLIC)

    def program_for(counts: Sequence[int]) -> Program:
        """With these multiples of the mesh's size in place of the sizes that are open."""
        sizes = list(traced)
        for dim, count in zip(open_dims, counts, strict=True):
            sizes[dim] = count * ranks
        return make_program(Question.of(mesh, source, target, tuple(sizes), local.dtype, async_op), mesh)

    here = [traced[dim] // ranks for dim in open_dims]
    found = program_for(here)
    _guard_numbers(found, program_for, here, shape, open_dims, ranks)
    sizes = tuple([ranks * (size // ranks) if dim in open_dims else size for dim, size in enumerate(shape)])
    before = found.before._replace(shape=sizes)
    program = dataclasses.replace(
        found,
        held=before.box(found.question.site.coordinate).length,
        before=before,
        after=found.after._replace(shape=sizes),
        steps=tuple([_on_shape(step, sizes) for step in found.steps]),
    )
    if tuple(local.shape) != program.held:
        raise NotOurs("a local tensor of another shape than its spec says")
    program.make_ready(mesh)
    return program


def _guard_numbers(
    found: Program, program_for: Any, here: Sequence[int], shape: Sequence[Any], open_dims: Sequence[int], ranks: int
) -> None:
    """Ask for guards on the number of elements, where another number would have another plan."""
    form = _form(found)

    def same(first: int) -> bool:
        return _form(program_for([first, *here[1:]])) == form

    least, most = here[0], here[0]
    if _form(program_for([1] * len(here))) != form:
        below = 0  # another plan, or none
        while least - below > 1:
            middle = (below + least) // 2
            below, least = (below, middle) if same(middle) else (middle, least)
        elements = math.prod([shape[dim] for dim in open_dims])
        _guard(elements >= ranks ** len(here) * math.prod([least, *here[1:]]))
    if _form(program_for([1 << _FAR] * len(here))) != form:
        above = 1 << _FAR
        while above - most > 1:
            middle = (above + most) // 2
            above, most = (above, middle) if same(middle) else (middle, most)
        elements = math.prod([shape[dim] for dim in open_dims])
        _guard(elements <= ranks ** len(here) * math.prod([most, *here[1:]]))


def _guard(condition: Any) -> None:
    if not guard_or_false(condition):
        raise NotOurs(SYMBOLIC)


def _form(program: Program) -> tuple[Step, ...]:
    """The steps without the sizes of the tensor."""
    return tuple([_on_shape(step, ()) for step in program.steps])


def _on_shape(step: Step, shape: tuple[Any, ...]) -> Step:
    """The same step on a tensor of another shape."""
    if isinstance(step, Divide):
        return step
    return dataclasses.replace(step, before=step.before._replace(shape=shape), after=step.after._replace(shape=shape))
