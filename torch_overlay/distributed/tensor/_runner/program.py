"""A program: the plan of a redistribution, made ready to run on this rank. Its steps
become functions of the local tensor, made once and kept with the plan.

Collectives are functional ones, so that compiling, fake tensors and CommDebugMode see
what runs. Even splits pack and unpack with one copy at most; the others piece by piece.
A collective is up to three functions, which pack, communicate and unpack: whoever calls
one after the other holds only what the next one reads, so that what was packed is free
before anything is unpacked.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._logging import trace_structured
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    _are_we_tracing,
)
from torch.nn.functional import pad

from ..._mesh.universe import find_group
from ..._torch import spanned  # overlay only
from .._planner.cost import Cost, collectives, in_one_round
from .._planner.grids import grids
from .._planner.regions import NotPlanned, in_runs
from .._planner.search import line
from .._planner.sizes import on_shape, shared_plan, step_on_shape
from .._planner.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Divide,
    Embed,
    Narrow,
    ReduceScatter,
    Step,
    last_collective,
)
from .at_hand import AtHand, Group, at_hand, gone
from .exchange import (
    MOVED,
    Here,
    Local,
    Stages,
    all_to_all_by_size,
    all_to_all_in_rounds,
    as_bytes,
    assembled,
    flattened,
    joined,
    nothing_of,
    packing,
    part,
    reduce_scatter_in_rounds,
    unpacking_in_place,
)
from .question import is_symbolic
from .specs import (
    gathered,
    gathers_step_by_step,
    into_terms,
    read_ends,
    same_step_by_step,
    scattered,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    from .._planner.regions import Box, Regions
    from .._planner.steps import Coordinate
    from .at_hand import Group
    from .exchange import Local
    from .question import Question


_functional = torch.ops._c10d_functional


def runners(
    steps: Sequence[Step],
    coordinate: Coordinate,
    held: Box,
    group_of: Callable[[tuple[int, ...]], Group],
    async_op: bool = False,
) -> Stages:
    """What takes the local tensor of the source, the box `held`, to that of the target,
    one function after the other.

    With `async_op` the last collective isn't waited for here: its result is an
    `AsyncCollectiveTensor`, for which whatever reads it waits. Where something reads it
    here, an unpack that copies or a step after it, it is waited for at once, and so is
    what runs in rounds.
    """
    last = last_collective(steps)
    made: list[Local] = []
    for number, step in enumerate(steps):
        wanted = held if isinstance(step, Divide) else step.after.box(coordinate)
        here = Here(coordinate, held, wanted)
        if isinstance(step, Collective):
            finish = _later if async_op and number == last else _wait
            made += _COLLECTIVES[type(step)](step, here, group_of(step.axes), finish)
        else:
            made.append(_LOCAL[type(step)](step, here))
        held = wanted
    return tuple(made)


def _divide(step: Divide, here: Here) -> Local:
    return lambda local: local / step.by


def _narrow(step: Narrow, here: Here) -> Local:
    box = step.box(here.coordinate)
    if 0 in box.length:
        return lambda local: nothing_of(local, box.length)
    return lambda local: part(local, box)


def _embed(step: Embed, here: Here) -> Local:
    box, shape = step.box(here.coordinate), here.wanted.length
    around = [
        (start, whole - start - length)
        for start, length, whole in zip(*box, shape, strict=True)
    ]
    # the last dim first
    padding = [zeros for ends in reversed(around) for zeros in ends]
    return lambda local: pad(local, padding)


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    return _functional.wait_tensor(tensor)


def _later(tensor: torch.Tensor) -> torch.Tensor:
    """Waited for when it is first used, except while tracing."""
    return _wait(tensor) if _are_we_tracing() else AsyncCollectiveTensor(tensor)


def _all_reduce(step: AllReduce, here: Here, group: Group, finish: Local) -> Stages:
    op, name = step.op, group.name
    # all_reduce itself makes a contiguous copy
    return (lambda local: finish(_functional.all_reduce(local, op, name)),)


def _moved(run: Local) -> Local:
    """Run a collective on contiguous tensors of any type: as bytes where backends don't
    move the type."""

    def on_bytes(flat: torch.Tensor) -> torch.Tensor:
        if flat.dtype in MOVED:
            return run(flat)
        return run(as_bytes(flat)).view(flat.dtype)

    return on_bytes


def _all_gather(step: AllGather, here: Here, group: Group, finish: Local) -> Stages:
    shape = here.wanted.length
    size, chunk, held = step.ranks, step.chunk, here.held.elements
    spelled = gathered(step, here.held, here.wanted) if group.in_order else None
    if spelled is not None:
        return _all_gather_spelled(*spelled, size, group, finish)
    gather = _moved(
        lambda flat: finish(_functional.all_gather_into_tensor(flat, size, group.name))
    )
    grid = grids(step, here.held, here.wanted)[1] if group.in_order else None
    if grid is not None:
        land = unpacking_in_place(grid, shape)
    else:
        pieces = [
            (group.places[piece.member] * chunk, piece.box)
            for piece in step.pieces(here.coordinate)
        ]
        blocks = in_runs(pieces)
        land = lambda flat: assembled(flat, blocks, shape)  # noqa: E731
    return (flattened if held == chunk else _padded(chunk - held)), gather, land


def _all_gather_spelled(
    pack: Local, join: Local | None, size: int, group: Group, finish: Local
) -> Stages:
    gather = _moved(
        lambda local: finish(
            _functional.all_gather_into_tensor(local, size, group.name)
        )
    )
    return (pack, gather) if join is None else (pack, gather, join)


def _padded(more: int) -> Local:
    return lambda local: pad(flattened(local), (0, more))


def _all_to_all(step: AllToAll, here: Here, group: Group, finish: Local) -> Stages:
    if step.rounds > 1:
        return (all_to_all_in_rounds(step, here, group),)
    return all_to_all_by_size(step, here, group, finish)


def _reduce_scatter(
    step: ReduceScatter, here: Here, group: Group, finish: Local
) -> Stages:
    if step.rounds > 1:
        return (reduce_scatter_in_rounds(step, here, group),)
    shape = here.wanted.length
    op, size, name, mine = step.op, step.ranks, group.name, here.wanted.elements
    spelled = scattered(step, here.held, here.wanted) if group.in_order else None
    if spelled is not None:
        return spelled, lambda local: finish(
            _functional.reduce_scatter_tensor(local, op, size, name)
        )
    grid = grids(step, here.held, here.wanted)[0] if group.in_order else None
    pack = (
        packing(grid)
        if grid is not None
        else _pack_padded(step, here.coordinate, group)
    )

    def land(flat: torch.Tensor) -> torch.Tensor:
        return (flat if flat.numel() == mine else flat.narrow(0, 0, mine)).view(shape)

    return (
        pack,
        lambda flat: finish(_functional.reduce_scatter_tensor(flat, op, size, name)),
        land,
    )


def _pack_padded(step: ReduceScatter, coordinate: Coordinate, group: Group) -> Local:
    """Each member's piece, padded to the length of the longest, in the order of the
    group."""
    chunk = step.chunk
    pieces = [
        (group.places[piece.member] * chunk, piece.box)
        for piece in step.pieces(coordinate)
    ]
    blocks, end = (
        [(at, box) for at, box in in_runs(sorted(pieces)) if at is not None],
        step.ranks * chunk,
    )

    def run(local: torch.Tensor) -> torch.Tensor:
        packed: list[torch.Tensor] = []
        at = 0
        for begin, box in blocks:
            if begin != at:
                packed.append(local.new_zeros(begin - at))
            packed.append(part(local, box))
            at = begin + box.elements
        return joined([*packed, local.new_zeros(end - at)] if at < end else packed)

    return run


_LOCAL: dict[type, Callable[..., Local]] = {
    Narrow: _narrow,
    Embed: _embed,
    Divide: _divide,
}
_COLLECTIVES: dict[type, Callable[..., Stages]] = {
    AllGather: _all_gather,
    AllReduce: _all_reduce,
    ReduceScatter: _reduce_scatter,
    AllToAll: _all_to_all,
}

logger = logging.getLogger(__name__)

# What a rank can bring together by itself; floats of eight bits, say, can't be added.
_REDUCED = MOVED | {torch.int16, torch.complex64, torch.complex128}
NOT_OF_COMPLEX = ("max", "min", "product")


@dataclass(eq=False, slots=True)
class Program:
    """The answer to a question: what to run.

    Attributes:
        question: to which it is the answer.
        held: what this rank holds before, whose shape the local tensor must have.
        before, after: what each coordinate holds.
        steps: the plan.
        at_hand: the groups of the mesh.
        norm: what the redistribution brings together, if it is the terms of a norm.
        averaged: of how many terms a sum of whole numbers is to be the average; 0 where
            none is.
        functions: what runs, one after the other; None until it is made ready.
        groups: the axes of each group that the functions use, by its name.
        in_order: whether these groups hold their ranks in the order of the mesh.
    """

    question: Question
    held: Box
    before: Regions
    after: Regions
    steps: tuple[Step, ...]
    at_hand: AtHand
    norm: _NormPartial | None
    averaged: int = 0
    functions: tuple[Local, ...] | None = None
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    in_order: bool = False
    # How often it ran.
    runs: int = 0  # overlay only

    @property
    def cost(self) -> Cost:
        """The cost model by which the plan was chosen."""
        return Cost.of(self.question.site.device)

    @property
    def text(self) -> str:
        """The plan as one line; of open sizes, for those that were traced."""
        ask = (
            self.on_shape(tuple(self.question.shape))
            if is_symbolic(self.before.shape)
            else self
        )
        return line(
            ask.before,
            ask.after,
            ask.steps,
            self.question.dtype.itemsize,
            self.question.site.names,
        )

    @property
    def ends(self) -> str:
        """The placements before and after, as ``S(0),R->R,R``."""
        return "->".join(
            ",".join(map(str, end))
            for end in (self.question.source, self.question.target)
        )

    def span_name(self) -> str:  # overlay only
        """What a profiler shows."""
        return f"redistribute {self.ends}"

    @property
    def described(self) -> str:
        """For logs: what is asked, and the plan, in one line."""
        ask = self.question
        names = ask.site.names or [f"dim_{axis}" for axis in range(len(ask.sizes))]
        mesh = ", ".join(
            f"{name}={size}" for name, size in zip(names, ask.sizes, strict=True)
        )
        dtype = str(ask.dtype).removeprefix("torch.")
        return f"{self.ends} of {dtype} {tuple(ask.shape)} on ({mesh}): {self.text}"

    def same_step_by_step(self, mesh: DeviceMesh) -> bool:
        """Whether the step-by-step path would run the same collective and nothing
        else."""
        if self.averaged or not self.in_order:
            return False
        return same_step_by_step(self.steps, self.question, mesh.device_type)

    def on_shape(self, shape: tuple[Any, ...]) -> Program:
        """The same for a tensor of another shape, maybe with symbols."""
        before = on_shape(self.before, shape)
        return replace(
            self,
            held=before.box(self.question.site.coordinate),
            before=before,
            after=on_shape(self.after, shape),
            steps=tuple([step_on_shape(step, shape) for step in self.steps]),
        )

    def make_ready(self, mesh: DeviceMesh) -> None:
        """Look up the groups and make the functions.

        Raises:
            RuntimeError: a group was destroyed.
            NotPlanned: a group holds other ranks than the mesh says.
        """
        used: dict[tuple[int, ...], Group] = {}

        def group_of(axes: tuple[int, ...]) -> Group:
            used[axes] = self.at_hand.find(mesh, axes)
            return used[axes]

        ask, coordinate = self.question, self.question.site.coordinate
        functions = runners(self.steps, coordinate, self.held, group_of, ask.async_op)
        if self.norm is not None:
            functions = (
                self.norm._pre_reduce_transform,
                *functions,
                self.norm._post_reduce_transform,
            )
        if self.averaged:
            functions = (
                _widened,
                *functions,
                partial(_average, terms=self.averaged, dtype=ask.dtype),
            )
        copy = self._last_copy()
        functions = functions if copy is None else (*functions, copy)
        self.groups = {group.name: axes for axes, group in used.items()}
        self.in_order = all(group.in_order for group in used.values())
        self.functions = functions

    def run(
        self,
        local: torch.Tensor,
        mesh: DeviceMesh,
        functions: Sequence[Local] | None = None,
    ) -> torch.Tensor:
        """What this rank holds after the plan, from what it held before; or after other
        functions that do the same.

        Raises:
            RuntimeError: a collective failed; if its group was destroyed, says which.
        """
        functions = self.functions if functions is None else functions
        if functions is None:
            raise AssertionError("a program runs after make_ready")
        self.runs += 1  # overlay only
        functions = spanned(self.span_name, functions)  # overlay only
        result = local
        try:
            for function in functions:
                result = function(result)
        except RuntimeError as error:
            missing = [
                axes for name, axes in self.groups.items() if find_group(name) is None
            ]
            if missing:
                raise RuntimeError(gone(mesh, missing[0])) from error
            raise
        return result

    def _last_copy(self) -> Local | None:
        """What makes the result a tensor of its own, as that of the step-by-step path
        is: where the plan ends in a view of something bigger, or does nothing while
        that path gathers. None where there is nothing to do.

        That path cuts into a copy with the same order of strides, and gathers into a
        contiguous tensor.
        """
        if (
            not collectives(self.steps)
            and 1 in self.question.sizes
            and gathers_step_by_step(self.question)
        ):
            return _copied
        if not self.steps or not isinstance(self.steps[-1], Narrow):
            return None
        only_cuts = all(isinstance(step, Narrow) for step in self.steps)
        return torch.Tensor.clone if only_cuts else _copied


def _copied(view: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of its own: a view would keep all of the tensor that it is a
    part of."""
    return view.clone(memory_format=torch.contiguous_format)


def _widened(terms: torch.Tensor) -> torch.Tensor:
    """Whole numbers of a type in which their sum doesn't overflow where its average
    wouldn't."""
    return terms.to(torch.int64)


def _average(total: torch.Tensor, terms: int, dtype: torch.dtype) -> torch.Tensor:
    """The whole part of the average, as where a sum is divided and what comes is cast;
    of truths, whether any is one."""
    return (
        total.to(dtype)
        if dtype is torch.bool
        else total.div(terms, rounding_mode="trunc").to(dtype)
    )


def tell(made: Program) -> None:
    """Say in the log, and in the trace that TORCH_TRACE asks for, that this was
    planned."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("planned %s", made.described)
    about = {"name": "redistribution_plan", "encoding": "string"}
    trace_structured(
        "artifact",
        lambda: about,
        payload_fn=lambda: made.described,
        expect_trace_id=False,
    )


def make_program(question: Question, mesh: DeviceMesh) -> Program:
    """Plan. Raises NotPlanned, with the reason, where the step-by-step path has to
    run."""
    sizes, shape, dtype = question.sizes, tuple(question.shape), question.dtype
    ends = read_ends(question, sizes)
    before, after = ends.before.on(shape, sizes), ends.after.on(shape, sizes)
    _check_reductions(before, after, dtype)
    before, averaged = _as_sum(before, after, dtype)
    groups, cost = at_hand(mesh, question.site), Cost.of(question.site.device)
    steps = shared_plan(before, after, dtype.itemsize, groups.joint, cost)
    if not groups.known and not _runs_step_by_step(
        question, mesh.device_type
    ).issuperset(map(type, steps)):
        raise NotPlanned(
            "a backend of a class that isn't built in, which may lack a collective"
        )
    if ends.made is not None:
        steps = into_terms(steps, ends.made)
    if question.async_op:
        # The caller goes on while a reduce-scatter that comes last runs. What comes
        # before is waited for in any case, and so is an all-to-all in rounds, as on the
        # step-by-step path.
        last = last_collective(steps)
        steps = (*steps[:last], *in_one_round(steps[last:], ReduceScatter))
    held = before.box(question.site.coordinate)
    return Program(question, held, before, after, steps, groups, ends.norm, averaged)


def _runs_step_by_step(question: Question, device_type: str) -> set[type[Step]]:
    """The kinds of steps that a plan may have on any backend: local ones, and the
    collectives of the step-by-step path."""
    kinds: set[type[Step]] = {Narrow, Embed, Divide}
    for old, new, size in zip(
        question.source, question.target, question.sizes, strict=True
    ):
        if old == new or size == 1 or old.is_replicate():
            continue
        if old.is_partial():
            kinds.add(AllReduce if new.is_replicate() else ReduceScatter)
        else:
            kinds.add(
                AllGather
                if new.is_replicate() or new.is_partial() or device_type == "cpu"
                else AllToAll
            )
    return kinds


def _ended(before: Regions, after: Regions) -> list[int]:
    """The axes on which a pending reduction ends."""
    ends = zip(before.partial, after.partial, strict=True)
    return [axis for axis, (op, new) in enumerate(ends) if op and new is None]


def _check_reductions(before: Regions, after: Regions, dtype: torch.dtype) -> None:
    """Raise NotPlanned for what the step-by-step path refuses, or leaves to the
    backend: a plan might give something else. It doesn't depend on the size, since
    compiled code has one program for many sizes."""
    ended = {before.partial[axis] for axis in _ended(before, after)}
    if dtype.is_complex and ended.intersection(NOT_OF_COMPLEX):
        raise NotPlanned(
            "complex numbers have no greatest or least, and no backend multiplies them"
        )
    if ended and dtype not in _REDUCED:
        raise NotPlanned("terms of a type that only a backend reduces")


def _as_sum(before: Regions, after: Regions, dtype: torch.dtype) -> tuple[Regions, int]:
    """An average of whole numbers as a sum, which is exact, and the number of its
    terms: no term may be divided before the others are added. 0 where nothing is
    averaged, or numbers that aren't whole."""
    axes = [axis for axis in _ended(before, after) if before.partial[axis] == "avg"]
    if not axes or dtype.is_floating_point or dtype.is_complex:
        return before, 0
    ops = tuple(
        ["sum" if axis in axes else op for axis, op in enumerate(before.partial)]
    )
    return before._replace(partial=ops), math.prod(
        [before.sizes[axis] for axis in axes]
    )
