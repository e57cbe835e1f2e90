"""A program: the plan of a redistribution, made ready to run on this rank. Its steps
become functions of the local tensor, which are made once and kept with the plan. Start
reading at `make_program` and `Program.run`.

The collectives are functional ones, so that compilers, fake tensors and CommDebugMode
see them. Even splits are packed and unpacked with one copy at most, uneven ones piece
by piece.

A collective is up to three functions: pack, communicate and unpack. `Program.run` calls
them one after the other and keeps only the latest result, so that the packed tensor is
freed before the received one is unpacked.
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
from .._planner.boxes import in_runs
from .._planner.cost import Cost, collectives, in_one_round
from .._planner.grids import grids
from .._planner.regions import OPS, NotPlanned
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
from .at_hand import AtHand, Group, at_hand, gone, wrong_order
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
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    from .._planner.boxes import Box
    from .._planner.regions import Regions
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
    """Make the functions that take the local tensor, one after the other, from the
    source to the target.

    With `async_op` the last collective isn't waited for: its result is an
    `AsyncCollectiveTensor`, which waits when it is first read, also by a later function
    here. An exchange in rounds always waits.
    """
    last = last_collective(steps)
    functions: list[Local] = []
    for number, step in enumerate(steps):
        wanted = held if isinstance(step, Divide) else step.after.box(coordinate)
        here = Here(coordinate, held, wanted)
        if isinstance(step, Collective):
            finish = _wait_later if async_op and number == last else _wait
            functions += _COLLECTIVES[type(step)](
                step, here, group_of(step.axes), finish
            )
        else:
            functions.append(_LOCAL[type(step)](step, here))
        held = wanted
    return tuple(functions)


def _make_divide(step: Divide, here: Here) -> Local:
    return lambda local: local / step.by


def _make_narrow(step: Narrow, here: Here) -> Local:
    """Make the function that cuts out the wanted box: a view, or empty
    (`nothing_of`)."""
    box = step.box(here.coordinate)
    # A rank whose target shard is empty. Its result still depends on the source, see
    # `nothing_of`.
    if 0 in box.length:
        return lambda local: nothing_of(local, box.length)
    return lambda local: part(local, box)


def _make_embed(step: Embed, here: Here) -> Local:
    box, shape = step.box(here.coordinate), here.wanted.length
    around = [
        (start, whole - start - length)
        for start, length, whole in zip(*box, shape, strict=True)
    ]
    # `pad` takes the last dim first.
    padding = [zeros for ends in reversed(around) for zeros in ends]
    return lambda local: pad(local, padding)


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    return _functional.wait_tensor(tensor)


def _wait_later(tensor: torch.Tensor) -> torch.Tensor:
    """Wait at the first use. A traced graph has an explicit wait, for compilers to
    move."""
    return _wait(tensor) if _are_we_tracing() else AsyncCollectiveTensor(tensor)


def _pending_by_itself(result: torch.Tensor) -> torch.Tensor:
    """Return a pending result that is no view for autograd. Compiled code whose sizes
    change can't take a view of a pending tensor: rank 1 of 7 rows that were reduced
    over two ranks, for one, and any exchange."""
    if type(result) is AsyncCollectiveTensor and result._is_view():
        return AsyncCollectiveTensor(result.elem)
    return result


def _make_all_reduce(
    step: AllReduce, here: Here, group: Group, finish: Local
) -> Stages:
    """Make the one function that all-reduces a local tensor into a new one."""
    op, name = step.op, group.name
    # No pack: all_reduce itself makes a contiguous copy.
    return (lambda local: finish(_functional.all_reduce(local, op, name)),)


def _as_bytes_if_needed(run: Local) -> Local:
    """Make a collective move any dtype: those that backends don't, as bytes."""

    def on_bytes(flat: torch.Tensor) -> torch.Tensor:
        if flat.dtype in MOVED:
            return run(flat)
        return run(as_bytes(flat)).view(flat.dtype)

    return on_bytes


def _make_all_gather(
    step: AllGather, here: Here, group: Group, finish: Local
) -> Stages:
    """Make the functions that pack, all-gather and, if needed, put shards in place."""
    shape = here.wanted.length
    size, chunk, held = step.ranks, step.chunk, here.held.elements
    # A group in another order than the mesh would put the shards in the wrong places.
    spelled = gathered(step, here.held, here.wanted) if group.in_order else None
    if spelled is not None:
        return _make_all_gather_spelled(*spelled, size, group, finish)
    gather = _as_bytes_if_needed(
        lambda flat: finish(_functional.all_gather_into_tensor(flat, size, group.name))
    )
    grid = grids(step, here.held, here.wanted)[1] if group.in_order else None
    if grid is not None:
        land = unpacking_in_place(grid, shape)
    else:
        # Uneven shards, or a group in another order: every piece is copied into its
        # box.
        pieces = [
            (group.places[piece.member] * chunk, piece.box)
            for piece in step.pieces(here.coordinate)
        ]
        blocks = in_runs(pieces)
        land = lambda flat: assembled(flat, blocks, shape)  # noqa: E731
    return (flattened if held == chunk else _padded(chunk - held)), gather, land


def _make_all_gather_spelled(
    pack: Local, join: Local | None, size: int, group: Group, finish: Local
) -> Stages:
    """Make the functions of an all-gather that runs on tensors in their own shape."""
    gather = _as_bytes_if_needed(
        lambda local: finish(
            _functional.all_gather_into_tensor(local, size, group.name)
        )
    )
    return (pack, gather) if join is None else (pack, gather, join)


def _padded(more: int) -> Local:
    """Make the function that flattens a local tensor and appends `more` zeros."""
    return lambda local: pad(flattened(local), (0, more))


def _make_all_to_all(step: AllToAll, here: Here, group: Group, finish: Local) -> Stages:
    """Make the functions of an all-to-all: one if it has rounds, else three."""
    # Rounds are made for large exchanges and always wait, so `finish` has no say.
    if step.rounds > 1:
        return (all_to_all_in_rounds(step, here, group),)
    return all_to_all_by_size(step, here, group, finish)


def _make_reduce_scatter(
    step: ReduceScatter, here: Here, group: Group, finish: Local
) -> Stages:
    """Make the functions that pack, reduce-scatter and, if needed, cut off the padding;
    one function, which waits in each round, if the step has rounds."""
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
    """Make the function that packs one piece for each member, padded with zeros to the
    length of the longest, in the order of the group."""
    chunk = step.chunk
    pieces = [
        (group.places[piece.member] * chunk, piece.box)
        for piece in step.pieces(coordinate)
    ]
    blocks = [(at, box) for at, box in in_runs(sorted(pieces)) if at is not None]
    end = step.ranks * chunk

    def run(local: torch.Tensor) -> torch.Tensor:
        packed: list[torch.Tensor] = []
        at = 0
        for begin, box in blocks:
            if begin != at:
                # The padding behind the piece before, or a member without a piece.
                packed.append(local.new_zeros(begin - at))
            packed.append(part(local, box))
            at = begin + box.elements
        return joined([*packed, local.new_zeros(end - at)] if at < end else packed)

    return run


_LOCAL: dict[type, Callable[..., Local]] = {
    Narrow: _make_narrow,
    Embed: _make_embed,
    Divide: _make_divide,
}
_COLLECTIVES: dict[type, Callable[..., Stages]] = {
    AllGather: _make_all_gather,
    AllReduce: _make_all_reduce,
    ReduceScatter: _make_reduce_scatter,
    AllToAll: _make_all_to_all,
}

logger = logging.getLogger(__name__)

# The dtypes whose terms a rank can reduce by itself. There is no addition of float8.
_REDUCED = MOVED | {torch.int16, torch.complex64, torch.complex128}


@dataclass(eq=False, slots=True)
class Program:
    """The answer to a question that has a plan: what to run.

    Attributes:
        question: the question that this answers.
        held: the box of this rank before. The local tensor must have its shape.
        before, after: the boxes of all coordinates before and after.
        steps: the plan.
        at_hand: the process groups of the mesh.
        norm: the norm whose terms are reduced, if any: powers are summed and the root
            is taken.
        averaged: the number of terms of an integer mean, which runs as a sum that is
            divided at the end; 0 if there is none.
        functions: what runs, one after the other; None before `make_ready`.
        groups: the axes of each process group that the functions use, by its name.
        in_order: True if all these groups have their ranks in the order of the mesh.
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
    # How often the program ran.
    runs: int = 0  # overlay only

    @property
    def cost(self) -> Cost:
        """The cost model by which the plan was chosen."""
        return Cost.of(self.question.site.device)

    @property
    def text(self) -> str:
        """The plan as one line. A plan for symbolic sizes shows the traced ones."""
        program = (
            self.on_shape(tuple(self.question.shape))
            if is_symbolic(self.before.shape)
            else self
        )
        return line(
            program.before,
            program.after,
            program.steps,
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
        return f"redistribute {self.ends}"

    @property
    def described(self) -> str:
        """The question and the plan as one line, for logs."""
        question = self.question
        names = question.site.names or [
            f"dim_{axis}" for axis in range(len(question.sizes))
        ]
        mesh = ", ".join(
            f"{name}={size}" for name, size in zip(names, question.sizes, strict=True)
        )
        dtype = str(question.dtype).removeprefix("torch.")
        return (
            f"{self.ends} of {dtype} {tuple(question.shape)} on ({mesh}): {self.text}"
        )

    def same_step_by_step(self, mesh: DeviceMesh) -> bool:
        """True if the step-by-step path would run the same collective and no more. The
        program must be ready, see `make_ready`."""
        # An integer mean is a sum here and a mean there. A group in another order needs
        # an unpack that the step-by-step path doesn't do.
        if self.averaged or not self.in_order:
            return False
        return same_step_by_step(self.steps, self.question, mesh.device_type)

    def on_shape(self, shape: tuple[Any, ...]) -> Program:
        """Return the program for another shape, maybe with symbols. Its functions are
        those of the old shape until `make_ready` is called on it."""
        before = on_shape(self.before, shape)
        return replace(
            self,
            held=before.box(self.question.site.coordinate),
            before=before,
            after=on_shape(self.after, shape),
            steps=tuple([step_on_shape(step, shape) for step in self.steps]),
        )

    def make_ready(self, mesh: DeviceMesh) -> None:
        """Look up `groups` and `in_order`, make `functions`. Can be called again."""
        used: dict[tuple[int, ...], Group] = {}

        def group_of(axes: tuple[int, ...]) -> Group:
            used[axes] = self.at_hand.find(mesh, axes)
            return used[axes]

        question, coordinate = self.question, self.question.site.coordinate
        functions = runners(
            self.steps, coordinate, self.held, group_of, question.async_op
        )
        # The terms of a p-norm are p-th powers only inside of the reduction.
        if self.norm is not None:
            functions = (
                self.norm._pre_reduce_transform,
                *functions,
                self.norm._post_reduce_transform,
            )
        if self.averaged:
            functions = (
                _to_int64,
                *functions,
                partial(_integer_mean, terms=self.averaged, dtype=question.dtype),
            )
        copy = self._last_copy()
        if copy is not None:
            functions = (*functions, copy)
        if question.async_op:
            functions = (*functions, _pending_by_itself)
        self.groups = {group.name: axes for axes, group in used.items()}
        self.in_order = all(group.in_order for group in used.values())
        self.functions = functions

    def run(
        self,
        local: torch.Tensor,
        mesh: DeviceMesh,
        functions: Sequence[Local] | None = None,
    ) -> torch.Tensor:
        """Run the plan on the local tensor. Every rank of the mesh must call it."""
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
            # A backend's message about a destroyed group names no mesh and no axes.
            missing = [
                axes for name, axes in self.groups.items() if find_group(name) is None
            ]
            if missing:
                raise RuntimeError(gone(mesh, missing[0])) from error
            raise
        return result

    def _last_copy(self) -> Local | None:
        """Return the copy that ends the program, or None if none is needed: the result
        must not share storage with the source or with a larger tensor, as it doesn't on
        the step-by-step path.
        """
        # Nothing to do, while the step-by-step path gathers over mesh dims of size 1.
        if (
            not collectives(self.steps)
            and 1 in self.question.sizes
            and gathers_step_by_step(self.question)
        ):
            return _contiguous_copy
        if not self.steps or not isinstance(self.steps[-1], Narrow):
            return None
        # A view: an in-place operation on the result would change the source, and it
        # would keep the larger tensor alive.
        # The strides are those of the step-by-step path: a cut keeps their order, a
        # gather makes a contiguous tensor.
        only_cuts = all(isinstance(step, Narrow) for step in self.steps)
        return torch.Tensor.clone if only_cuts else _contiguous_copy


def _contiguous_copy(view: torch.Tensor) -> torch.Tensor:
    """Copy a view, which would keep the whole tensor behind it alive."""
    return view.clone(memory_format=torch.contiguous_format)


def _to_int64(terms: torch.Tensor) -> torch.Tensor:
    """Widen integers before a sum: eight terms of 100 overflow int8, their mean
    doesn't."""
    return terms.to(torch.int64)


def _integer_mean(total: torch.Tensor, terms: int, dtype: torch.dtype) -> torch.Tensor:
    """Divide a sum of integers by its terms, truncated toward zero; for bool, `any`."""
    return (
        total.to(dtype)
        if dtype is torch.bool
        else total.div(terms, rounding_mode="trunc").to(dtype)
    )


def tell(program: Program) -> None:
    """Log a new plan at DEBUG level and into the trace of TORCH_TRACE."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("planned %s", program.described)
    metadata = {"name": "redistribution_plan", "encoding": "string"}
    trace_structured(
        "artifact",
        lambda: metadata,
        payload_fn=lambda: program.described,
        expect_trace_id=False,
    )


def tell_fallback(reason: str, source: DTensorSpec, target: DTensorSpec) -> None:
    """Log at DEBUG level that the step-by-step path runs, and why there is no plan."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "%s %s -> %s: step by step: %s",
            tuple(source.shape),
            source.placements,
            target.placements,
            reason,
        )


def make_program(question: Question, mesh: DeviceMesh) -> Program:
    """Plan a redistribution. The program isn't ready to run yet, see `make_ready`."""
    wrong = wrong_order(mesh)
    if wrong is not None:
        raise RuntimeError(wrong)
    sizes, shape, dtype = question.sizes, tuple(question.shape), question.dtype
    ends = read_ends(question, sizes)
    before, after = ends.before.on(shape, sizes), ends.after.on(shape, sizes)
    _check_reductions(before, after, dtype)
    # Backends divide the terms of an average first, which truncates integers.
    before, averaged = _as_sum(before, after, dtype)
    groups, cost = at_hand(mesh, question.site), Cost.of(question.site.device)
    steps = shared_plan(before, after, dtype.itemsize, groups.joint, cost)
    # A backend that somebody registered may lack all_to_all, say. It needs the
    # collectives of the step-by-step path in any case.
    if not groups.known and not _runs_step_by_step(
        question, mesh.device_type
    ).issuperset(map(type, steps)):
        raise NotPlanned(
            "a backend of a class that isn't built in, which may lack a collective"
        )
    # The planner knows sums only: it made terms of a sum, which are divided
    # differently.
    if ends.made is not None:
        steps = into_terms(steps, ends.made)
    if question.async_op:
        # The caller goes on while a last reduce-scatter runs, which rounds would
        # prevent. Earlier collectives are waited for in any case, and so is an
        # all-to-all in rounds, as it is on the step-by-step path.
        last = last_collective(steps)
        steps = (*steps[:last], *in_one_round(steps[last:], ReduceScatter))
    held = before.box(question.site.coordinate)
    return Program(question, held, before, after, steps, groups, ends.norm, averaged)


def _runs_step_by_step(question: Question, device_type: str) -> set[type[Step]]:
    """Return the kinds of steps that a plan may have on any backend: the local ones,
    and the collectives that the step-by-step path runs for the same question."""
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


def _ended_reductions(before: Regions, after: Regions) -> list[int]:
    """Return the axes on which a pending reduction ends."""
    ends = zip(before.partial, after.partial, strict=True)
    return [axis for axis, (op, new) in enumerate(ends) if op and new is None]


def _check_reductions(before: Regions, after: Regions, dtype: torch.dtype) -> None:
    """Refuse reductions that the step-by-step path refuses, or that only the backend
    can do: another collective might give another result. It doesn't depend on the
    sizes, since compiled code has one program for many sizes."""
    ops = [before.partial[axis] for axis in _ended_reductions(before, after)]
    if dtype.is_complex and any(op and OPS[op].wrong_by_parts for op in ops):
        raise NotPlanned(
            "complex numbers have no greatest or least, and no backend multiplies them"
        )
    if ops and dtype not in _REDUCED:
        raise NotPlanned("terms of a type that only a backend reduces")


def _as_sum(before: Regions, after: Regions, dtype: torch.dtype) -> tuple[Regions, int]:
    """Turn an integer mean into a sum, which is exact, and count its terms (else 0).
    Terms that are divided before they are added aren't: 3 and 3 over two ranks would be
    1 + 1."""
    axes = [
        axis
        for axis in _ended_reductions(before, after)
        if before.partial[axis] == "avg"
    ]
    if not axes or dtype.is_floating_point or dtype.is_complex:
        return before, 0
    ops = tuple(
        ["sum" if axis in axes else op for axis, op in enumerate(before.partial)]
    )
    return before._replace(partial=ops), math.prod(
        [before.sizes[axis] for axis in axes]
    )
