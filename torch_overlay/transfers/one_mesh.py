"""A tree of tensors on one mesh: all that moves goes in the same exchanges, along the axes that some tensor changes, by
the groups of the mesh."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from ..distributed._group_table import find_group as resolve
from ..distributed._mesh_group_names import group_names
from ..distributed._mesh_state import view_of
from ..distributed.tensor._joint_groups import find_group, joint_axes
from ..distributed.tensor._planner.moves import crossed
from ..distributed.tensor._planner.regions import NotPlanned, Regions
from ..distributed.tensor._specs import read_cuts
from ._planner.reductions import Reduction, phases
from ._planner.schedule import ROUNDED, Schedule, kept_schedule
from ._planner.sides import Move, Ranks, Side
from .exchanges import Exchanges
from .phases import free_results, moves_of, reduce_parts, room

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from .targets import Placements


class Change(NamedTuple):
    """One tensor, and what is to become of it.

    Attributes:
        before, after: what each coordinate holds; nothing is pending after.
        reduction: of what is pending; None if nothing is.
    """

    tensor: DTensor
    placements: Placements
    before: Regions
    after: Regions
    reduction: Reduction | None

    @property
    def axes(self) -> frozenset[int]:
        """Along which pieces move, when nothing is pending any more."""
        return crossed(self.reduction.after if self.reduction else self.before, self.after)


def read_change(tensor: DTensor, placements: Placements) -> Change | None:
    """What is to be done on a mesh that has groups; None if a call for this tensor alone should do it."""
    mesh, spec, shape = tensor.device_mesh, tensor._spec, tuple(tensor.shape)
    if group_names(mesh) is None or mesh.get_coordinate() is None:
        return None
    try:
        sizes = tuple(mesh.shape)
        before = read_cuts(spec.placements, spec.shard_order, len(shape), sizes).on(shape, sizes)
        after = read_cuts(placements, None, len(shape), sizes).on(shape, sizes)
    except NotPlanned:
        return None
    averages = "avg" in before.partial and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    odd = any(placement.is_partial() and type(placement).__name__ != "Partial" for placement in spec.placements)
    if after.pending or averages or odd:
        return None
    return Change(tensor, placements, before, after, _reduction(mesh, before, after))


def _reduction(mesh: DeviceMesh, before: Regions, after: Regions) -> Reduction | None:
    if not before.pending:
        return None
    reduction = Reduction.toward(before, after)
    axes = tuple(sorted(crossed(reduction.after, after)))
    return reduction if len(axes) < 2 or axes in joint_axes(mesh) else Reduction.toward(before, after, elsewhere=False)


def change_together(
    mesh: DeviceMesh, changes: Sequence[Change], budget: int, receivers: frozenset[int] = frozenset()
) -> list[torch.Tensor] | None:
    """The new local tensors; None if there is no group over the axes along which they move.

    Collective over the ranks that differ along these axes only, which all give the same changes.

    Args:
        receivers: the only ranks that want the results, which are whole tensors then; others get empty ones, and send.
            All ranks want theirs if none are given.
    """
    axes = tuple(sorted(frozenset().union(*[change.axes for change in changes])))
    if len(axes) > 1 and axes not in joint_axes(mesh):
        return None
    group, ranks = _group_and_ranks(mesh, axes)
    some = sorted(receivers.intersection(ranks.ranks)) if receivers else None
    wants = some is None or dist.get_rank() in some
    coordinate = mesh.get_coordinate() or []
    targets = []
    for change in changes:
        wanted = change.after.box(coordinate).length if wants else (0,)
        targets.append(change.tensor._local_tensor.new_empty(wanted, requires_grad=False))
    tensors = [change.tensor for change in changes]
    locals_ = [tensor._local_tensor.detach() for tensor in tensors]
    moves = _moves(changes, ranks, some)
    for parts in phases([change.reduction for change in changes], [move.itemsize for move in moves], budget):
        sources = reduce_parts(parts, tensors, locals_)
        if some == []:
            free_results(parts, sources)
            continue
        these = moves_of(parts, moves)
        schedule = kept_schedule(these, dist.get_rank(), len(ranks.ranks))
        count = _count(schedule, these, room(parts, moves, budget), group)
        exchanges = Exchanges(schedule, count, group, targets[0].device)
        exchanges.run(sources, [targets[part.number] if wants else None for part in parts])
        free_results(parts, sources)
    return targets


def _group_and_ranks(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[ProcessGroup | None, Ranks]:
    """The group over these axes, and who stands where in this rank's copy of it; without axes, this rank alone."""
    here = mesh.get_coordinate() or []
    ranges = [range(at, at + 1) for at in here]
    for axis in axes:
        ranges[axis] = range(mesh.size(axis))
    if not axes:
        return None, Ranks([dist.get_rank()], ranges)
    view = view_of(mesh)
    members = view.show(view.layout.select(axes)).ranks(mesh._rank)
    return resolve(find_group(mesh, axes, mesh._rank).name), Ranks(members, ranges)


def _moves(changes: Iterable[Change], ranks: Ranks, receivers: Sequence[int] | None) -> list[Move]:
    """Each tensor's; of one that is pending, as if it weren't."""
    found = []
    alone = Ranks.of(receivers, (len(receivers),)) if receivers else None
    for change in changes:
        before, after = change.before.without_pending(change.before.pending), Side(change.after, ranks)
        if alone is not None:
            sizes = (len(alone.ranks),)
            after = Side(read_cuts((Replicate(),), None, len(before.shape), sizes).on(before.shape, sizes), alone)
        found.append(Move(Side(before, ranks), after, change.tensor.dtype.itemsize))
    return found


def _count(schedule: Schedule, moves: Sequence[Move], budget: int, group: ProcessGroup | None) -> int:
    """How many exchanges all ranks of the group make: one if all there is fits the budget, which they know without
    asking; else they ask one another."""
    if group is None:
        return 0
    ranks = group.size()
    most = ROUNDED * 2 * ranks
    for move in moves:
        most += move.itemsize * (ranks * move.source.regions.most + move.target.regions.most)
    if most <= budget:
        return 1
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else torch.accelerator.current_accelerator()
    least = torch.tensor(schedule.least(budget), device=device)
    dist.all_reduce(least, dist.ReduceOp.MAX, group=group)
    return math.ceil(least.item())
