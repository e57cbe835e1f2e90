"""Tensors from one mesh to another in one world, in which every rank knows both: nothing has to be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..distributed._rank_map import of_ranks
from ..distributed.tensor._planner.regions import NotPlanned
from ._planner.flow import moves_of
from ._planner.reductions import Reduction, phases
from ._planner.routes import Move
from ._planner.schedule import kept_schedule
from ._planner.sides import Side
from .descriptions import Meshes, misfit, regions_of, regions_on
from .exchanges import Exchanges
from .groups import agreed_count, kept_group
from .notes import one_fate
from .pending import refusal
from .phases import free_results, reduce_parts, room
from .teams import Team

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from .targets import Placements

Target = tuple["DeviceMesh", "Placements"]


def change_meshes(
    tensors: Sequence[DTensor], targets: Sequence[Target], budget: int, names: Sequence[str]
) -> list[DTensor]:
    """The tensors on their new meshes. A rank outside of one holds nothing of it, as torch has it.

    Collective over the ranks of all these meshes.

    Raises:
        ValueError: a target with a pending reduction, a reduction that torch doesn't do, meshes for different devices,
            or a budget that is too small.
        NotPlanned: shards that are no boxes.
        RuntimeError: this rank is in none of the meshes.
    """
    meshes = Meshes()
    moves = moves_across(tensors, targets, meshes)
    made = []
    for tensor, move, (mesh, _) in zip(tensors, moves, targets):
        here = meshes.see(mesh).here
        # Outside of its mesh a tensor is empty; with all its dims, so that gradients can flow through it there.
        shape_here = (0,) * max(tensor.ndim, 1) if here is None else move.target.box(here).length
        made.append(torch.empty(shape_here, dtype=tensor.dtype, device=tensor._local_tensor.device))
    sides = {side.ranks for move in moves for side in (move.source, move.target)}
    members = sorted({rank for ranks in sides for rank in ranks.ranks})
    group = kept_group(members)
    if group is None:
        raise RuntimeError(
            f"Rank {dist.get_rank()} redistributes between meshes over {of_ranks(members)}, and is none of them."
        )
    wrong = [misfit(name, tensor, move.source.regions, meshes) for name, tensor, move in zip(names, tensors, moves)]
    with one_fate(group, wrong):
        _exchange(tensors, moves, made, budget, group, meshes)
    return [made_like(tensor, local, *target) for tensor, local, target in zip(tensors, made, targets)]


def moves_across(tensors: Sequence[DTensor], targets: Sequence[Target], meshes: Meshes) -> list[Move]:
    """Each tensor's way to its new mesh; of one that is pending, as if it weren't. Raises as `change_meshes` does."""
    moves = []
    for tensor, (mesh, placements) in zip(tensors, targets):
        _check(tensor, mesh, placements)
        shape, sizes = tuple(tensor.shape), meshes.see(mesh).sizes
        before = regions_of("the tensor", tensor, meshes)
        for axis in sorted(before.pending):
            why = refusal(before.partial[axis] or "", tensor.dtype, mesh.device_type)
            if why is not None:
                raise ValueError(f"A tensor of {tensor.dtype} with {tensor.placements} can't change its mesh: {why}.")
        after = regions_on(placements, None, shape, sizes)
        ends = [meshes.ranks(each) for each in (tensor.device_mesh, mesh)]
        source = Side(before.without_pending(before.pending), ends[0])
        moves.append(Move(source, Side(after, ends[1]), tensor.dtype.itemsize))
    return moves


def can_cross(tensor: DTensor, mesh: DeviceMesh, placements: Placements) -> bool:
    """Whether `change_meshes` takes it."""
    try:
        moves_across([tensor], [(mesh, placements)], Meshes())
    except (ValueError, NotPlanned):
        return False
    return True


def reductions_across(tensors: Sequence[DTensor], meshes: Meshes) -> list[Reduction | None]:
    """How each tensor that is pending is reduced on its mesh."""
    regions = [regions_of("the tensor", tensor, meshes) for tensor in tensors]
    return [Reduction.apart(each) if each.pending else None for each in regions]


def made_like(tensor: DTensor, local: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """A DTensor of the same shape and strides on another mesh, or with other placements."""
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    return DTensor(local, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)


def _exchange(
    tensors: Sequence[DTensor],
    moves: Sequence[Move],
    made: Sequence[torch.Tensor],
    budget: int,
    group: ProcessGroup,
    meshes: Meshes,
) -> None:
    rank, team = dist.get_rank(), Team.of(group)
    held, wanted = (
        [local if side.ranks.coordinate(rank) is not None else None for local, side in zip(locals_, sides)]
        for locals_, sides in (
            ([tensor._local_tensor.detach() for tensor in tensors], [move.source for move in moves]),
            (made, [move.target for move in moves]),
        )
    )
    for parts in phases(reductions_across(tensors, meshes), [move.itemsize for move in moves], budget):
        these = moves_of(parts, moves)
        schedule = kept_schedule(these, rank, group.size())
        count, _ = agreed_count(schedule, room(parts, moves, budget), team, made[0].device)
        exchanges = Exchanges(schedule, count, team, made[0].device)
        given = reduce_parts(parts, [tensor.device_mesh for tensor in tensors], held)
        exchanges.run(given, [wanted[part.number] for part in parts])
        free_results(parts, given)


def _check(tensor: DTensor, mesh: DeviceMesh, placements: Placements) -> None:
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"A tensor can't get a pending reduction on another mesh; asked for {placements}.")
    if tensor.device_mesh.device_type != mesh.device_type:
        raise ValueError(
            f"A redistribution from one mesh to another stays on one type of device; asked for one from "
            f"{tensor.device_mesh.device_type} to {mesh.device_type}."
        )
