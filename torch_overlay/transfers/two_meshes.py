"""Tensors from one mesh to another in one world, in which every rank knows both: nothing has to be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..distributed._mesh.text import of_ranks
from ..distributed._torch import span
from ..show.words import counted
from ._planner.routes import Move
from ._planner.schedule import KEPT, kept_schedule
from ._planner.sides import Side
from .descriptions import Meshes, misfit, regions_of, regions_on
from .exchanges import Exchanges
from .groups import agreed_count, kept_group, most_bytes
from .notes import one_fate
from .plan_log import tell
from .teams import Team

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from .targets import Placements

Target = tuple["DeviceMesh", "Placements"]
PLANS = 4  # of a world, that are remembered


def change_meshes(
    tensors: Sequence[DTensor], targets: Sequence[Target], budget: int, names: Sequence[str]
) -> list[DTensor]:
    """The tensors on their new meshes. A rank outside of one holds nothing of it, as torch has it.

    Collective over the ranks of all these meshes.

    Raises:
        ValueError: a pending reduction on either side, meshes for different devices, or a budget that is too small.
        NotPlanned: shards that are no boxes.
        RuntimeError: this rank is in none of the meshes.
    """
    meshes = Meshes()
    key = tuple([_key(tensor, *target, meshes) for tensor, target in zip(tensors, targets)]), budget
    plan = _taken(key) or _Plan.of(tensors, targets, budget, meshes)
    made = []
    for tensor, shape in zip(tensors, plan.shapes):
        made.append(torch.empty(shape, dtype=tensor.dtype, device=tensor._local_tensor.device))
    wrong: list[str | None] = []
    if any(tensor._local_tensor.shape != shape for tensor, shape in zip(tensors, plan.held)):
        wrong += [misfit(name, t, move.source.regions, meshes) for name, t, move in zip(names, tensors, plan.moves)]
    told = span(f"redistribute {counted(len(tensors), 'tensor')}")
    with told, one_fate(plan.group, wrong, plan.asks) as is_wrong:
        _exchange(tensors, plan, made, is_wrong)
    _keep(key, plan, tensors)
    return [made_like(tensor, local, *target) for tensor, local, target in zip(tensors, made, targets)]


def _key(tensor: DTensor, mesh: DeviceMesh, placements: Placements, meshes: Meshes) -> Any:
    """What a tensor's plan depends on; by class, too: a subclass of Partial calls itself equal to it. It has no mesh,
    which would keep its groups alive."""
    spec, here = tensor._spec, tensor.device_mesh
    ranks = meshes.ranks(here), meshes.ranks(mesh), here.device_type, mesh.device_type
    kinds = tuple(map(type, (*spec.placements, *placements)))
    local = tensor._local_tensor
    order = getattr(spec, "shard_order", None)
    return *ranks, spec.placements, order, placements, kinds, tensor.shape, tensor.dtype, local.device


class _Plan(NamedTuple):
    """What is found once for tensors that lie alike.

    Attributes:
        shapes: of what this rank gets; outside of a mesh nothing, with all its dims, so that gradients can flow there.
        held: of what this rank has.
        budget: for buffers.
        asks: whether it may take several exchanges; all ranks find the same.
        ready: the exchanges, as they were made the last time, if they were.
    """

    moves: list[Move]
    shapes: list[tuple[int, ...]]
    held: list[tuple[int, ...]]
    group: ProcessGroup
    budget: int
    asks: bool
    ready: list[Exchanges]

    @staticmethod
    def of(tensors: Sequence[DTensor], targets: Sequence[Target], budget: int, meshes: Meshes) -> _Plan:
        """Raises as `change_meshes`, before anything is sent."""
        moves = moves_across(tensors, targets, meshes)
        shapes, held = [], []
        for tensor, move, (mesh, _) in zip(tensors, moves, targets):
            here, there = meshes.see(tensor.device_mesh).here, meshes.see(mesh).here
            shapes.append((0,) * max(tensor.ndim, 1) if there is None else move.target.box(there).length)
            held.append(tuple(tensor._local_tensor.shape) if here is None else move.source.box(here).length)
        sides = {side.ranks for move in moves for side in (move.source, move.target)}
        members = sorted({rank for ranks in sides for rank in ranks.ranks})
        for tensor, (mesh, _) in zip(tensors, targets):
            _check_one_view(tensor.device_mesh, members, meshes)
            _check_one_view(mesh, members, meshes)
        group = kept_group(members)
        if group is None:
            raise RuntimeError(
                f"Rank {dist.get_rank()} redistributes between meshes over {of_ranks(members)}, and is none of them."
            )
        told = f"{counted(len(moves), 'tensor')} of {of_ranks(members)} from mesh to mesh"
        tell("redistribution_plan", lambda: told)
        return _Plan(moves, shapes, held, group, budget, most_bytes(moves, members) > budget, [])


# Plans of this world, by what they were made for, the latest last. One that is used isn't in it.
_plans: WeakKeyDictionary[ProcessGroup, dict[Any, _Plan]] = WeakKeyDictionary()


def _taken(key: Any) -> _Plan | None:
    """A plan that was made before; its group is still there."""
    plan = _plans.get(distributed_c10d._get_default_group(), {}).pop(key, None)
    return plan if plan is not None and plan.group in distributed_c10d._world.pg_map else None


def _keep(key: Any, plan: _Plan, tensors: Sequence[DTensor]) -> None:
    """A program that moves its model does so again and again. What is large isn't kept, nor what has no numbers."""
    if len(tensors) * plan.group.size() > KEPT or any(type(t._local_tensor) is not torch.Tensor for t in tensors):
        return
    known = _plans.setdefault(distributed_c10d._get_default_group(), {})
    known[key] = plan
    while len(known) > PLANS:
        known.pop(next(iter(known)), None)


def moves_across(tensors: Sequence[DTensor], targets: Sequence[Target], meshes: Meshes) -> list[Move]:
    """Each tensor's way to its new mesh. Raises as `change_meshes` does."""
    moves = []
    for tensor, (mesh, placements) in zip(tensors, targets):
        _check(tensor, mesh, placements)
        shape, sizes = tuple(tensor.shape), meshes.see(mesh).sizes
        before = regions_of("the tensor", tensor, meshes)
        after = regions_on(placements, None, shape, sizes)
        ends = [meshes.ranks(each) for each in (tensor.device_mesh, mesh)]
        moves.append(Move(Side(before, ends[0]), Side(after, ends[1]), tensor.dtype.itemsize))
    return moves


def made_like(tensor: DTensor, local: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """A DTensor of the same shape and strides on another mesh, or with other placements."""
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    return DTensor(local, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)


def _exchange(tensors: Sequence[DTensor], plan: _Plan, made: Sequence[torch.Tensor], is_wrong: bool) -> None:
    team, moves, device = Team.of(plan.group), plan.moves, made[0].device
    held, wanted = (
        [local if side.ranks.coordinate(team.rank) is not None else None for local, side in zip(locals_, sides)]
        for locals_, sides in (
            ([tensor._local_tensor.detach() for tensor in tensors], [move.source for move in moves]),
            (made, [move.target for move in moves]),
        )
    )
    _ready(plan, team, device, is_wrong).run(held, wanted)


def _ready(plan: _Plan, team: Team, device: torch.device, is_wrong: bool) -> Exchanges:
    """The exchanges. How many there are follows from the moves alone, or ranks ask one another each time: what one of
    them remembers, another may have forgotten."""
    schedule = plan.ready[0].schedule if plan.ready else kept_schedule(plan.moves, team.rank, len(team.ranks))
    count = agreed_count(schedule, plan.budget, team, device, is_wrong)[0] if plan.asks else 1
    if [exchanges.count for exchanges in plan.ready] != [count]:
        plan.ready[:] = [Exchanges(schedule, count, team, device)]
    return plan.ready[0]


def _check_one_view(mesh: DeviceMesh, members: Sequence[int], meshes: Meshes) -> None:
    """ValueError if other ranks that take part have another slice of the same name.

    From a 2x2 mesh to `mesh["a"]`, ranks 0 and 1 each plan for a slice of their own, {0, 2} and {1, 3}, and would
    exchange by two different plans: wrong values, without an error.
    """
    root = mesh._get_root_mesh()
    if root is mesh:
        return
    own = {*meshes.see(mesh).ranks}
    others = {*meshes.see(root).ranks}.intersection(members) - own
    if others:
        have = "has" if len(others) == 1 else "have"
        raise ValueError(
            f"A redistribution over {of_ranks(members)} needs meshes that are the same on all of them, and got a slice "
            f"over {of_ranks(sorted(own))}: {of_ranks(sorted(others))} of its root mesh {have} another one. "
            "Redistribute on the root mesh and take the local tensor, or make a DeviceMesh of these ranks."
        )


def _check(tensor: DTensor, mesh: DeviceMesh, placements: Placements) -> None:
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"A tensor can't get a pending reduction on another mesh; asked for {placements}.")
    if tensor.device_mesh.device_type != mesh.device_type:
        raise ValueError(
            f"A redistribution from one mesh to another stays on one type of device; asked for one from "
            f"{tensor.device_mesh.device_type} to {mesh.device_type}."
        )
