"""Torch's plan for a redistribution, read into the same steps as ours, so that both can be counted and shown alike.

The plan is torch's own: its planner is asked, and its merging of steps over flattened meshes. Nothing communicates,
and the meshes that are made for it have no process groups.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as torch_redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ..compat._mesh_layout import flattened_layout
from ..compat.tensor import merged, shards_become_terms
from ..compat.tensor_mesh import without_groups
from ..distributed._torch_layout import from_torch
from ..distributed.tensor._planner.regions import Regions, chunk
from ..distributed.tensor._planner.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Divide,
    Embed,
    Narrow,
    ReduceScatter,
    Step,
)
from . import placements


class TorchStep(NamedTuple):
    """One step of torch's plan.

    Attributes:
        step: as the overlay would say it; None where it has no such step.
        axes: of the mesh, more than one where torch merged.
        source: the placement that the step takes away.
        target: the one that it brings.
        trouble: what torch does wrong here, as a sentence, or nothing.
    """

    step: Step | None
    axes: tuple[int, ...]
    source: Placement
    target: Placement
    trouble: str = ""


def stand_in_mesh(
    device_type: str, sizes: Sequence[int], ranks: Sequence[int], names: Sequence[str], flattened: Sequence[Any]
) -> DeviceMesh:
    """A mesh of any size, seen from its first rank, without process groups; `flattened` lists the axes that a user
    flattened together."""
    shape = torch.tensor(ranks, dtype=torch.int, device="cpu").view(*sizes)
    mesh = without_groups(device_type, shape, tuple(names), ranks[0])
    layout = from_torch(mesh._layout)
    for axes in flattened:
        # All that torch's merging asks of a flattened mesh is its layout.
        joint = layout.select(sorted(axes)).collapse()
        mesh._flatten_mapping["_".join(names[axis] for axis in sorted(axes))] = _Flattened(flattened_layout(joint))
    return mesh


class _Flattened:
    def __init__(self, layout: Any) -> None:
        self._layout = layout


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """A spec of a contiguous tensor that nobody makes."""
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), strides, dtype))


def to_torch_placement(placement: placements.Placement) -> Placement:
    """The planner's word for a placement, as torch's."""
    if isinstance(placement, placements.Shard):
        return Shard(placement.dim)
    if isinstance(placement, placements.StridedShard):
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return Partial(placement.op) if isinstance(placement, placements.Partial) else Replicate()


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
        infos = merged(infos, mesh, source.placements, target.placements)
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
    issues: set[Any] = getattr(torch_redistribute, "_warned_flatten_issues", set())  # merges since 2.11
    known = set(issues)
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)
        issues.intersection_update(known)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _read(
    info: Any, axes: tuple[int, ...], before: Regions | None, device_type: str, ranks: Sequence[int] | None
) -> tuple[list[TorchStep], Regions | None]:
    """One of torch's steps, as one or two of ours, and what is held after it."""
    source, target = info.src_dst_placements
    strided = isinstance(source, _StridedShard) or isinstance(target, _StridedShard)
    trouble = _refused(source, target)
    if before is None or strided or trouble:
        return [TorchStep(None, axes, source, target, trouble)], None
    after = _changed(before, axes, source, target)
    made = [TorchStep(step, axes, source, target) for step in _steps(before, after, axes, source, target, device_type)]
    if made[0].step is not None and (trouble := _misplaced(made[0].step, ranks)):
        made[0] = made[0]._replace(trouble=trouble)
    scale = getattr(info, "avg_scale", None)
    if scale:
        made.append(TorchStep(Divide(scale), axes, source, target))
    return made, after


def _refused(source: Placement, target: Placement) -> str:
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
        whole = _changed(before, axes, source, Replicate())
        return [AllGather(before, whole, axes), Narrow(whole, after)]
    if target.is_partial() and target.reduce_op == "sum":
        return [Divide(math.prod(before.sizes[axis] for axis in axes))]
    return [Narrow(before, after)]


def _changed(regions: Regions, axes: tuple[int, ...], source: Placement, target: Placement) -> Regions:
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
