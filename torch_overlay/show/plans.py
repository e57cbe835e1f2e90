"""Both plans for a redistribution: torch asked, ours made, each put into lines.

Torch's plan is read into the same steps as ours, so that both can be counted and shown alike: its planner is asked, and
its merging of steps over flattened meshes. Nothing communicates, and the meshes that are made for it have no process
groups.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as torch_redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ..compat._mesh_layout import flattened_layout
from ..compat.tensor import shards_become_terms
from ..distributed._torch_layout import from_torch
from ..distributed.tensor._planner.cost import arriving, collectives, leaving
from ..distributed.tensor._planner.plan import NAMES, flatten_call
from ..distributed.tensor._planner.regions import NotPlanned, Regions, chunk
from ..distributed.tensor._planner.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Divide,
    Embed,
    Narrow,
    ReduceScatter,
    Step,
)
from ..distributed.tensor._plans.specs import into_terms, norm_ended, norm_made
from ..versions import running
from . import typed
from .explanation import Explanation, Redistribution, ShownPlan, ShownStep
from .words import counted, joined


def explained(question: Redistribution, source: Any, target: Any) -> Explanation:
    """Ask both planners.

    Args:
        source: torch's spec before.
        target: torch's spec after.
    """
    question = replace(question, refused=question.refused or _refused(source, target))
    made = norm_made(tuple(source.placements), tuple(target.placements))
    return Explanation(question, _torchs(question, source, target), _ours(question, made))


def _refused(source: Any, target: Any) -> str:
    """What the runner leaves to torch although it could be planned."""
    try:
        norm_ended(tuple(source.placements), tuple(target.placements), tuple(source.mesh.shape))
    except NotPlanned as reason:
        return str(reason)
    return ""


def _torchs(question: Redistribution, source: Any, target: Any) -> ShownPlan:
    name = f"torch {running().text}"
    try:
        found = torch_steps(source, target, question.source)
    except Exception as error:  # of any kind: what torch says is the explanation
        return ShownPlan(name, (), f"torch can't plan this: {type(error).__name__}: {' '.join(str(error).split())}")
    return ShownPlan(name, tuple([_torch_line(question, step) for step in found]))


def _torch_line(question: Redistribution, found: TorchStep) -> ShownStep:
    axes = tuple(question.names[axis] for axis in found.axes)
    if found.step is None:
        ranks = math.prod(question.sizes[axis] for axis in found.axes)
        why = f"{found.change} over {','.join(axes)}"
        return ShownStep("?", axes, ranks, "", None, None, None, why, found.trouble)
    assert question.target is not None, "torch's steps are read only where both ends are boxes"
    why = _why_torchs(found.step, question.names, question.target)
    sent = padded(found.step) if isinstance(found.step, AllToAll) else None
    return _line(question, found.step, why, found.trouble, sent)


def _ours(question: Redistribution, made: Any) -> ShownPlan:
    name = "torch_overlay"
    try:
        steps = question.planned() if made is None else into_terms(question.planned(), made)
        best = question.planned(all_groups=True)
    except NotPlanned as reason:
        return ShownPlan(name, (), f"leaves this to torch's own code, without merging where that is wrong: {reason}")
    return ShownPlan(name, _our_lines(question, steps), _missing(question, steps, best))


def _missing(question: Redistribution, steps: tuple[Step, ...], best: tuple[Step, ...]) -> str:
    """Which calls would make the groups that the plan lacks, and what it would be with them; empty if it lacks none."""
    if collectives(best) >= collectives(steps):
        return ""
    wanted = [step.axes for step in best if isinstance(step, Collective) and len(step.axes) > 1]
    lacked = dict.fromkeys(axes for axes in wanted if axes not in (question.groups or ()))
    calls = " and ".join(flatten_call(axes, question.names if question.named else None) for axes in lacked)
    return f"would be {counted(collectives(best), 'collective')} with {calls}"


def _our_lines(question: Redistribution, steps: tuple[Step, ...]) -> tuple[ShownStep, ...]:
    # An average that ends as a sum is divided after it; what is split into terms of a sum is divided last.
    assert question.source is not None, "a plan has a source"
    averages = "avg" in question.source.partial and any(getattr(step, "op", None) == "sum" for step in steps)
    lines = []
    for step in steps:
        lines.append(_line(question, step, _why_ours(step, averages)))
        averages = averages and not isinstance(step, Divide)
    return tuple(lines)


def _line(
    question: Redistribution, step: Step, why: str, trouble: str = "", sent: Collective | None = None
) -> ShownStep:
    """A step in words; `sent` is what goes over the wire where that is more."""
    name = NAMES[type(step)]
    op = getattr(step, "op", None)
    name = f"{name}({op})" if op else name
    holds = "" if isinstance(step, Divide) else str(step.after)
    if not isinstance(step, Collective):
        return ShownStep(name, (), 1, holds, 0, 0, 0.0, why, trouble, step=step)
    sent = sent or step
    incoming, outgoing = arriving(sent) * question.itemsize, leaving(sent) * question.itemsize
    seconds = question.cost.seconds(sent, question.itemsize)
    axes = tuple(question.names[axis] for axis in step.axes)
    rounds = getattr(step, "rounds", 1)
    return ShownStep(name, axes, step.ranks, holds, incoming, outgoing, seconds, why, trouble, rounds, step)


# --- why a step is there ---

_EMBED = "local: a shard becomes a term of a sum, with zeros around it"
_ENDED = {"sum": "sum", "avg": "average", "max": "maximum", "min": "minimum"}


def _why_ours(step: Step, averages: bool) -> str:
    """Why the overlay's plan has this step; `averages`: whether a division ends an average or splits a value."""
    if isinstance(step, Narrow):
        return "local: each rank holds what it wants and keeps that"
    if isinstance(step, Embed):
        return _EMBED
    if isinstance(step, Divide):
        return f"local: divide by {step.by}, " + ("the terms of the average" if averages else "the parts of each value")
    if isinstance(step, AllGather):
        return "each rank holds a part of what all of them want"
    if isinstance(step, AllReduce):
        return f"ends the {_ENDED.get(step.op, step.op)}: all ranks get the result"
    if isinstance(step, ReduceScatter):
        return f"ends the {_ENDED.get(step.op, step.op)}: each rank gets only its own part"
    return "each rank gets all terms of its own part" if getattr(step, "op", None) else "each rank gets what it lacks"


def _why_torchs(step: Step, names: tuple[str, ...], target: Regions) -> str:
    """What one of torch's steps does, and what it costs beyond need, if it does."""
    if isinstance(step, Divide):
        return f"local: divide by {step.by}"
    if isinstance(step, Embed):
        return _EMBED
    if isinstance(step, Narrow):
        axes = [names[axis] for axis in sorted(step.after.sharded - step.before.sharded)]
        if not axes:
            return "local: each value becomes a term"
        return f"local: {joined(axes)} cuts {_dims(step.before, step.after)}"
    assert isinstance(step, Collective), step
    merged = "merged: " if len(step.axes) > 1 else ""
    if isinstance(step, AllReduce):
        unused = any(axis in target.sharded for axis in step.axes)
        return merged + f"ends the {_ENDED.get(step.op, step.op)}" + (", to be cut later" if unused else "")
    if isinstance(step, ReduceScatter):
        return merged + f"ends the {_ENDED.get(step.op, step.op)}, cut into {_dims(step.before, step.after)}"
    if isinstance(step, AllToAll):
        over = joined([names[axis] for axis in step.axes])
        return f"{over} cuts {_dims(step.before, step.after)} instead of {_dims(step.after, step.before)}"
    text = merged + f"gathers {_dims(step.after, step.before)}"
    again = [names[axis] for axis in step.axes if axis in target.sharded]
    return text + (f", to be cut over {joined(again)} again later" if again else "")


def _dims(without: Regions, with_: Regions) -> str:
    """The dims that more axes cut in the second than in the first."""
    dims = [dim for dim, (old, new) in enumerate(zip(without.orders, with_.orders)) if set(new) - set(old)]
    return f"dim {joined([str(dim) for dim in dims])}" if dims else "nothing"


# --- torch's plan, in our steps ---


class TorchStep(NamedTuple):
    """One step of torch's plan.

    Attributes:
        step: as the overlay would say it; None where it has no such step.
        axes: of the mesh, more than one where torch merged.
        change: the placement that the step takes away, and the one that it brings, in words.
        trouble: what torch does wrong here, as a sentence, or nothing.
    """

    step: Step | None
    axes: tuple[int, ...]
    change: str
    trouble: str = ""


def stand_in_mesh(
    device_type: str, sizes: Sequence[int], ranks: Sequence[int], names: Sequence[str], flattened: Sequence[Any]
) -> DeviceMesh:
    """A mesh of any size, seen from its first rank, without process groups; `flattened` lists the axes that a user
    flattened together."""
    shape = torch.tensor(ranks, dtype=torch.int, device="cpu").view(*sizes)
    mesh = DeviceMesh(device_type, shape, mesh_dim_names=tuple(names), _init_backend=False, _rank=ranks[0])
    layout = from_torch(mesh._layout)
    for axes in flattened:
        # All that torch's merging asks of a flattened mesh is its layout.
        joint = layout.select(sorted(axes)).collapse()
        mesh._flatten_mapping["_".join(names[axis] for axis in sorted(axes))] = SimpleNamespace(
            _layout=flattened_layout(joint)
        )
    return mesh


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """A spec of a contiguous tensor that nobody makes."""
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), strides, dtype))


def to_torch_placement(placement: typed.Placement) -> Placement:
    """The planner's word for a placement, as torch's."""
    if isinstance(placement, typed.Shard):
        return Shard(placement.dim)
    if isinstance(placement, typed.StridedShard):
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return Partial(placement.op) if isinstance(placement, typed.Partial) else Replicate()


def word_of(placement: Placement) -> str:
    """`R`, `S0`, `P`, `P(max)`, `_S0(2)`: as one types it."""
    if isinstance(placement, _StridedShard):
        return f"_S{placement.dim}({placement.split_factor})"
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return "R" if isinstance(placement, Replicate) else str(placement)


def torch_steps(source: DTensorSpec, target: DTensorSpec, regions: Regions | None) -> list[TorchStep]:
    """Torch's plan from one spec to another.

    Args:
        regions: what the source means, or None if it has no boxes; then no step is translated.

    Raises:
        whatever torch's planner raises, of which there are many kinds.
    """
    mesh = source.device_mesh
    with _unheard():
        infos = torch_redistribute._gen_transform_infos_non_cached(source, target)
        infos = torch_redistribute._optimize_transform_infos(infos, mesh, source.placements, target.placements)
    # Groups are sorted, unless a mesh says otherwise.
    ranks = None if getattr(mesh, "_preserve_rank_order", False) else mesh.mesh.flatten().tolist()
    steps: list[TorchStep] = []
    for info in infos:
        axes = getattr(info, "original_mesh_dims", (info.mesh_dim,))
        axes = tuple(axis for axis in sorted(axes) if mesh.size(axis) > 1)
        if axes:
            made, regions = _read(info, axes, regions, mesh.device_type, ranks)
            steps += made
    return steps


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Torch warns once of what it can't merge. Here it must not, and must be able to, later."""
    logger = logging.getLogger(torch_redistribute.__name__)
    issues: set[Any] = torch_redistribute._warned_flatten_issues
    known, disabled = set(issues), logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = disabled
        issues.intersection_update(known)


def _read(
    info: Any, axes: tuple[int, ...], before: Regions | None, device_type: str, ranks: Sequence[int] | None
) -> tuple[list[TorchStep], Regions | None]:
    """One of torch's steps, as one or two of ours, and what is held after it."""
    source, target = info.src_dst_placements
    strided = isinstance(source, _StridedShard) or isinstance(target, _StridedShard)
    change, trouble = f"from {word_of(source)} to {word_of(target)}", _cannot_run(source, target)
    if before is None or strided or trouble:
        return [TorchStep(None, axes, change, trouble)], None
    after = _changed(before, axes, target)
    first, *others = _steps(before, after, axes, source, target, device_type)
    others += [Divide(info.avg_scale)] if getattr(info, "avg_scale", None) else []
    made = [TorchStep(first, axes, change, _misplaced(first, ranks))]
    return made + [TorchStep(step, axes, change) for step in others], after


def _cannot_run(source: Placement, target: Placement) -> str:
    """What torch plans, and then can't run."""
    if not target.is_partial():
        return ""
    becomes_term = shards_become_terms() and type(target) is Partial and target.reduce_op == "sum"
    if isinstance(source, Shard) and not becomes_term:
        return "torch raises RuntimeError here: it can't make a pending term from a shard"
    if source.is_partial():
        return "torch raises AssertionError here: one pending reduction can't become another"
    return ""


def _steps(
    before: Regions, after: Regions, axes: tuple[int, ...], source: Placement, target: Placement, device_type: str
) -> list[Step]:
    if source.is_partial():
        kinds = {before.partial[axis] for axis in axes}
        op = kinds.pop() if len(kinds) == 1 else "sum"
        assert op is not None, f"{source} on axes {axes}, where {before} has nothing pending"
        reduce = AllReduce if target.is_replicate() else ReduceScatter
        return [reduce(before, after, axes, op)]
    if isinstance(source, Shard) and target.is_partial():
        return [Embed(before, after)]
    if isinstance(source, Shard):
        if target.is_replicate():
            return [AllGather(before, after, axes)]
        if device_type != "cpu":
            return [AllToAll(before, after, axes)]
        whole = _changed(before, axes, Replicate())
        return [AllGather(before, whole, axes), Narrow(whole, after)]
    if target.is_partial() and target.reduce_op == "sum":
        return [Divide(math.prod(before.sizes[axis] for axis in axes))]
    return [Narrow(before, after)]


def _changed(regions: Regions, axes: tuple[int, ...], target: Placement) -> Regions:
    """What is held after these axes changed their placement."""
    orders = [tuple(axis for axis in order if axis not in axes) for order in regions.orders]
    if isinstance(target, Shard):
        orders[target.dim] += axes
    op = target.reduce_op if target.is_partial() else None
    partial = tuple(op if axis in axes else old for axis, old in enumerate(regions.partial))
    return Regions(regions.shape, regions.sizes, tuple(orders), partial)


def padded(step: AllToAll) -> AllToAll:
    """What torch really sends: both dims of its all-to-all are padded to equal pieces."""
    shape = list(step.before.shape)
    for dim, (old, new) in enumerate(zip(step.before.orders, step.after.orders)):
        for axis in old:
            shape[dim] = -(-shape[dim] // step.before.sizes[axis])
        added = math.prod(step.before.sizes[axis] for axis in new if axis not in old)
        shape[dim] = -(-shape[dim] // added) * added * math.prod(step.before.sizes[axis] for axis in old)
    before, after = (Regions(tuple(shape), r.sizes, r.orders, r.partial) for r in (step.before, step.after))
    return AllToAll(before, after, step.axes)


def _misplaced(step: Step, ranks: Sequence[int] | None) -> str:
    """What a step of torch's puts where it doesn't belong: torch takes the pieces of a group to be the equal chunks of
    one dim, in the order in which the group holds its ranks.

    Args:
        ranks: of the mesh, row-major, if groups hold them in ascending order; None if they keep the mesh's order.
    """
    if isinstance(step, AllGather):
        whole, cut = step.after, step.before
    elif isinstance(step, ReduceScatter):
        whole, cut = step.before, step.after
    else:
        return ""
    places = {place: i for i, place in enumerate(itertools.product(*map(range, cut.sizes)))}
    for dim, order in enumerate(cut.orders):
        if set(order) == set(whole.orders[dim]):
            continue
        for first in places:
            if any(first[axis] for axis in step.axes):
                continue
            members = step.members(first)
            taken = [chunk(whole.span(dim, first)[1], len(members), i) for i in range(len(members))]
            by_rank = members if ranks is None else sorted(members, key=lambda place: ranks[places[place]])
            if _same(taken, whole, cut, dim, by_rank):
                continue
            if _same(taken, whole, cut, dim, members):
                return "torch takes the wrong elements here: the group's ranks are in another order than the mesh's"
            return "torch takes the wrong elements here: it merges shards that are uneven"
    return ""


def _same(taken: list[tuple[int, int]], whole: Regions, cut: Regions, dim: int, members: list[tuple[int, ...]]) -> bool:
    """Whether the members really hold these chunks (start and length along a dim) of what they have together."""
    start = whole.span(dim, members[0])[0]
    for (offset, length), member in zip(taken, members):
        at, held = cut.span(dim, member)
        if held != length or (held and at - start != offset):
            return False
    return True
