"""A tree of tensors from one mesh to the same or another mesh of one world, where every rank knows both.

On one mesh, all that moves goes in the same exchanges, by the groups of the mesh, along the axes that some tensor
changes (`change_together`). To another mesh it goes by a group of the ranks of both (`change_meshes`).
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Replicate

from ..distributed._mesh.state import group_names
from ..distributed._mesh.text import of_ranks
from ..distributed._mesh.universe import find_group
from ..distributed._torch import span
from ..distributed.tensor._planner.regions import NotPlanned, Regions
from ..distributed.tensor._planner.search import crossed
from ..distributed.tensor._runner.at_hand import Site, at_hand, joint_axes
from ..distributed.tensor._runner.specs import read_cuts
from ..show.words import counted
from ._planner.routes import Move
from ._planner.schedule import KEPT, kept_schedule
from ._planner.sides import Ranks, Side
from .exchanges import Exchanges, agreed_count, log_plan, most_bytes
from .sharding import Meshes, misfit, regions_of, regions_on
from .team import Team, kept_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from .trees import Placements


_calls: WeakKeyDictionary[ProcessGroup, Counter[str]] = WeakKeyDictionary()


@contextmanager
def one_fate(group: ProcessGroup | None, wrong: Sequence[str | None], asks: bool = False) -> Iterator[bool]:
    """For what the ranks of a group do together: if this rank can't, the others hear why. With `asks` at once, before
    anything is sent; else when they gave up waiting, as they do where the backend's `wait` blocks the host (gloo).

    Gives whether something is wrong here.

    Args:
        wrong: what is wrong on this rank; None is nothing.
        asks: whether the ranks ask one another first, by `agreed_count`; the same on all of them.

    Raises:
        ValueError: something is wrong on this rank.
        RuntimeError: something failed; says what was wrong on another rank.
    """
    text = "; ".join(one.removesuffix(".") for one in wrong if one is not None)
    if group is None:
        if text:
            raise ValueError(f"Nothing was redistributed: {text}.")
        yield False
        return
    calls = _calls.setdefault(distributed_c10d._get_default_group(), Counter())
    calls[group.group_name] += 1
    key = f"torch_overlay/{group.group_name}/redistribution {calls[group.group_name]}"
    if text:
        distributed_c10d._get_default_store().set(key, text)
        if not asks:
            raise ValueError(f"Nothing was redistributed: {text}.")
    try:
        yield bool(text)
    except RuntimeError as error:
        if text:
            raise ValueError(f"Nothing was redistributed: {text}.") from None
        store = distributed_c10d._get_default_store()
        if store.check([key]):
            raise RuntimeError(f"Nothing was redistributed: {store.get(key).decode()}.") from error
        raise


class Change(NamedTuple):
    """One tensor, and what is to become of it.

    Attributes:
        before, after: what each coordinate holds; nothing is pending.
        name: for errors.
    """

    tensor: DTensor
    placements: Placements
    before: Regions
    after: Regions
    name: str

    @property
    def axes(self) -> frozenset[int]:
        """Along which pieces move."""
        return crossed(self.before, self.after)


def read_change(tensor: DTensor, placements: Placements, name: str = "a tensor") -> Change | None:
    """What is to be done on a mesh that has groups; None if a call for this tensor alone should do it."""
    mesh, spec, shape = tensor.device_mesh, tensor._spec, tuple(tensor.shape)
    if group_names(mesh) is None or mesh.get_coordinate() is None or not at_hand(mesh, Site.of(mesh)).known:
        return None
    try:
        sizes = tuple(mesh.shape)
        before = regions_on(spec.placements, spec.shard_order, shape, sizes)
        after = regions_on(placements, None, shape, sizes)
    except NotPlanned:
        return None
    if after.pending or any(placement.is_partial() for placement in spec.placements):
        return None
    return Change(tensor, placements, before, after, name)


def batches(mesh: DeviceMesh, changes: Mapping[int, Change]) -> tuple[list[list[int]], list[int]]:
    """Which tensors of a mesh go together, by number, and which go alone, since no group at hand is over all axes along
    which one of them moves."""
    if _is_at_hand(mesh, _axes(changes.values())):
        return [list(changes)], []
    parts: dict[frozenset[int], list[int]] = {}
    for number, change in changes.items():
        parts.setdefault(change.axes, []).append(number)
    together = [some for axes, some in parts.items() if _is_at_hand(mesh, tuple(sorted(axes)))]
    alone = [number for axes, some in parts.items() if not _is_at_hand(mesh, tuple(sorted(axes))) for number in some]
    return together, alone


def _axes(changes: Iterable[Change]) -> tuple[int, ...]:
    return tuple(sorted(frozenset().union(*[change.axes for change in changes])))


def _is_at_hand(mesh: DeviceMesh, axes: tuple[int, ...]) -> bool:
    """True if one process group of the mesh spans exactly these axes, which ascend. A single axis always has one."""
    return len(axes) < 2 or axes in joint_axes(mesh)


def change_together(
    mesh: DeviceMesh, changes: Sequence[Change], budget: int, receivers: frozenset[int] = frozenset()
) -> list[torch.Tensor]:
    """The new local tensors of one of the `batches`.

    Collective over the ranks that differ along these axes only, which all give the same changes.

    Args:
        receivers: the only ranks that want the results, which are whole tensors then; others get empty ones, and send.
            All ranks want theirs if none are given.
    """
    axes = _axes(changes)
    ranks = ranks_along(mesh, axes, mesh.get_coordinate() or [])
    group = find_group(at_hand(mesh, Site.of(mesh)).find(mesh, axes).name) if axes else None
    some = sorted(receivers.intersection(ranks.ranks)) if receivers else None
    is_wanted, wants = some != [], some is None or dist.get_rank() in some
    moves = moves_along(changes, ranks, some) if is_wanted else []
    asks = group is not None and most_bytes(moves, range(group.size())) > budget
    meshes = Meshes()
    wrong = [misfit(change.name, change.tensor, change.before, meshes) for change in changes]
    told = span(f"redistribute {counted(len(changes), 'tensor')}")
    with told, one_fate(group, wrong, asks) as is_wrong:
        coordinate = mesh.get_coordinate() or []
        targets = []
        for change in changes:
            wanted = change.after.box(coordinate).length if wants else (0,)
            targets.append(change.tensor._local_tensor.new_empty(wanted, requires_grad=False))
        if not is_wanted:
            return targets
        team = Team.of(group, targets[0].device)
        schedule = kept_schedule(moves, dist.get_rank(), 1 if group is None else group.size())
        # Where all that there is fits the budget, ranks know without asking that it is one exchange.
        count = agreed_count(schedule, budget, team, is_wrong)[0] if asks else int(group is not None)
        sources = [change.tensor._local_tensor.detach() for change in changes]
        Exchanges(schedule, count, team).run(sources, targets if wants else [None] * len(changes))
        return targets


def ranks_along(mesh: DeviceMesh, axes: Sequence[int], here: Sequence[int]) -> Ranks:
    """Who stands where along these axes, from a coordinate."""
    ranges = [range(mesh.size(axis)) if axis in axes else range(at, at + 1) for axis, at in enumerate(here)]
    members = mesh.mesh[tuple([slice(part.start, part.stop) for part in ranges])]
    return Ranks(members.flatten().tolist(), ranges)


def moves_along(changes: Iterable[Change], ranks: Ranks, receivers: Sequence[int] | None = None) -> list[Move]:
    """Each tensor's."""
    found = []
    alone = Ranks.of(receivers, (len(receivers),)) if receivers else None
    for change in changes:
        before, after = change.before, Side(change.after, ranks)
        if alone is not None:
            sizes = (len(alone.ranks),)
            after = Side(read_cuts((Replicate(),), None, len(before.shape), sizes).on(before.shape, sizes), alone)
        found.append(Move(Side(before, ranks), after, change.tensor.dtype.itemsize))
    return found


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
            here, there = meshes.view(tensor.device_mesh).coordinate, meshes.view(mesh).coordinate
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
        log_plan("redistribution_plan", lambda: told)
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
        shape, sizes = tuple(tensor.shape), meshes.view(mesh).sizes
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
    team = Team.of(plan.group, made[0].device)
    held, wanted = (
        [local if side.ranks.coordinate(team.rank) is not None else None for local, side in zip(locals_, sides)]
        for locals_, sides in (
            ([tensor._local_tensor.detach() for tensor in tensors], [move.source for move in plan.moves]),
            (made, [move.target for move in plan.moves]),
        )
    )
    _ready(plan, team, is_wrong).run(held, wanted)


def _ready(plan: _Plan, team: Team, is_wrong: bool) -> Exchanges:
    """The exchanges. How many there are follows from the moves alone, or ranks ask one another each time: what one of
    them remembers, another may have forgotten."""
    schedule = plan.ready[0].schedule if plan.ready else kept_schedule(plan.moves, team.rank, len(team.ranks))
    count = agreed_count(schedule, plan.budget, team, is_wrong)[0] if plan.asks else 1
    if [exchanges.count for exchanges in plan.ready] != [count]:
        plan.ready[:] = [Exchanges(schedule, count, team)]
    return plan.ready[0]


def _check_one_view(mesh: DeviceMesh, members: Sequence[int], meshes: Meshes) -> None:
    """ValueError if other ranks that take part have another slice of the same name.

    From a 2x2 mesh to `mesh["a"]`, ranks 0 and 1 each plan for a slice of their own, {0, 2} and {1, 3}, and would
    exchange by two different plans: wrong values, without an error.
    """
    root = mesh._get_root_mesh()
    if root is mesh:
        return
    own = {*meshes.view(mesh).ranks}
    others = {*meshes.view(root).ranks}.intersection(members) - own
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
