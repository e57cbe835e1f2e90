"""A tree of tensors from one mesh to the same or another mesh of one world, where every rank knows both.

On one mesh, all that moves goes in the same exchanges, by the groups of the mesh, along the axes that some tensor
changes (`change_together`). To another mesh it goes by a group of the ranks of both (`change_meshes`).
"""

from __future__ import annotations

import itertools
import zlib
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
from ..rendezvous.team import Team, kept_group
from ..show.words import counted
from ._planner.routes import Move
from ._planner.schedule import KEPT, kept_schedule
from ._planner.sides import Ranks, Side
from .exchanges import Exchanges, agreed_count, log_plan, most_bytes
from .sharding import Meshes, misfit, regions_of, regions_on

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from .trees import Placements


_calls: WeakKeyDictionary[ProcessGroup, Counter[str]] = WeakKeyDictionary()


@contextmanager
def share_problems(group: ProcessGroup | None, wrong: Sequence[str | None], asks: bool = False) -> Iterator[bool]:
    """Wrap what the ranks of a group do together, so that ranks that can take part hear why another one can't.

    A rank with a problem writes it into the store. With `asks`, all ranks raise at once, before anything is sent. Else
    the others find it there when they have given up waiting for this rank, as they do where a wait blocks the host
    (gloo).
    """
    text = "; ".join(problem.removesuffix(".") for problem in wrong if problem is not None)
    if group is None:
        if text:
            raise ValueError(f"Nothing was redistributed: {text}.")
        yield False
        return
    # Each redistribution of a group has a key of its own, so that a problem of an earlier one isn't found again.
    calls = _calls_in_world()
    calls[group.group_name] += 1
    key = _call_key(group, calls[group.group_name])
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
        for said in (key, f"{key} asks"):
            if store.check([said]):
                raise RuntimeError(f"Nothing was redistributed: {store.get(said).decode()}.") from error
        raise


def _calls_in_world() -> Counter[str]:
    """How many redistributions each group of this world did, by its name."""
    return _calls.setdefault(distributed_c10d._get_default_group(), Counter())


def _call_key(group: ProcessGroup, number: int) -> str:
    """The key in the store under which a rank says what is wrong with a redistribution of its group."""
    return f"torch_overlay/{group.group_name}/redistribution {number}"


class Asked(NamedTuple):
    """What this rank asks for one tensor: all of it has to be equal on all ranks. As text, it is compared.

    Attributes:
        before, after: its placements; with the sizes of its mesh, where that changes.
    """

    name: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.name!r} goes from {self.before} to {self.after}"


# For each group, what was asked for which tensors, with this rank's budget and the one that all agreed on.
_agreed: WeakKeyDictionary[ProcessGroup, dict[tuple[Asked, ...], tuple[int, int]]] = WeakKeyDictionary()


def agreed_budget(group: ProcessGroup, budget: int, asked: tuple[Asked, ...], device: torch.device) -> int:
    """Return the smallest budget of all ranks of the group, after comparing what they ask for. Collective over the
    group when these tensors are first moved so, and when a rank gives another budget than for them before; else nobody
    talks.

    Budgets that differed on two ranks made one of them ask for the number of exchanges, while the other began with the
    only one that it saw, and both hung.
    """
    team = Team.of(group, device)
    if len(team.ranks) == 1 or team.is_fake:
        return budget
    known = _agreed.setdefault(group, {})
    own, smallest = known.get(asked, (None, budget))
    if own == budget:
        return smallest
    key = f"{_call_key(group, _calls_in_world()[group.group_name] + 1)} asks"
    store = distributed_c10d._get_default_store()
    # Others that did the same before with their budget don't ask, and hear of it when they have waited.
    others = "another budget= than before" if own is not None else f"what was not moved so before, {asked[0]}"
    store.set(key, f"rank {dist.get_rank()} gives {others}, and other ranks don't: give the same on all ranks")
    text = "; ".join(map(str, asked))
    said = team.gather([zlib.crc32(text.encode()), budget])
    if len({crc for crc, _ in said}) > 1:
        lists = team.gather_data([*map(str, asked)])
        store.delete_key(key)
        raise ValueError(
            f"A redistribution over {of_ranks(sorted(team.ranks))} is the same on all ranks, and they differ: "
            f"{_first_difference(lists)}. Give the same tensors, mesh and placements on all of them."
        )
    store.delete_key(key)
    if len(known) == AGREED:
        known.clear()  # on all ranks, which asked for the same
    smallest = min(each for _, each in said)
    known[asked] = budget, smallest
    return smallest


def _first_difference(lists: Mapping[int, Sequence[str]]) -> str:
    """Say in which entry lists of ranks first differ, with the ranks that have each."""
    for entries in itertools.zip_longest(*lists.values(), fillvalue="nothing more is moved"):
        if len({*entries}) > 1:
            by_entry: dict[str, list[int]] = {}
            for rank, entry in zip(lists, entries):
                by_entry.setdefault(entry, []).append(rank)
            return ", and ".join(f"{entry} on {of_ranks(sorted(ranks))}" for entry, ranks in by_entry.items())
    raise AssertionError("the lists differ")


class Change(NamedTuple):
    """One tensor that gets other placements on its own mesh.

    Attributes:
        placements: the new ones.
        before, after: which coordinate holds which box; nothing is pending.
        name: for errors.
    """

    tensor: DTensor
    placements: Placements
    before: Regions
    after: Regions
    name: str

    @property
    def axes(self) -> frozenset[int]:
        """The axes of the mesh along which ranks send something to one another."""
        return crossed(self.before, self.after)


def read_change(tensor: DTensor, placements: Placements, name: str = "a tensor") -> Change | None:
    """Read what is to change for a tensor that may move together with others.

    None if it can't, and a redistribution of this tensor alone should do it: its mesh has no process groups, or not
    this rank; shards aren't boxes; or a reduction is pending on either side.
    """
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
    """Decide which tensors of a mesh move together.

    If the mesh has one process group over all axes along which any of them moves, all go together. Else those go
    together that move along the same axes, if the mesh has a group over these.
    """
    if _is_at_hand(mesh, _axes(changes.values())):
        return [list(changes)], []
    parts: dict[frozenset[int], list[int]] = {}
    for number, change in changes.items():
        parts.setdefault(change.axes, []).append(number)
    is_at_hand = {axes: _is_at_hand(mesh, tuple(sorted(axes))) for axes in parts}
    together = [numbers for axes, numbers in parts.items() if is_at_hand[axes]]
    alone = [number for axes, numbers in parts.items() if not is_at_hand[axes] for number in numbers]
    return together, alone


def _axes(changes: Iterable[Change]) -> tuple[int, ...]:
    """Return all axes along which some of these tensors move, ascending."""
    return tuple(sorted(frozenset().union(*[change.axes for change in changes])))


def _is_at_hand(mesh: DeviceMesh, axes: tuple[int, ...]) -> bool:
    """True if one process group of the mesh spans exactly these axes, which ascend. A single axis always has one."""
    return len(axes) < 2 or axes in joint_axes(mesh)


def change_together(
    mesh: DeviceMesh,
    changes: Sequence[Change],
    budget: int,
    receivers: frozenset[int] = frozenset(),
    is_compared: bool = False,
) -> list[torch.Tensor]:
    """Move the tensors of one of the `batches`, and return their new local tensors.

    Collective over this rank's slice of the mesh along the axes on which some of the tensors move. All ranks of the
    slice give the same changes.
    """
    axes = _axes(changes)
    ranks = ranks_along(mesh, axes, mesh.get_coordinate() or [])
    group = find_group(at_hand(mesh, Site.of(mesh)).find(mesh, axes).name) if axes else None
    own_receivers = sorted(receivers.intersection(ranks.ranks)) if receivers else None
    # Receivers may all be elsewhere, on ranks that differ on other axes; then nobody here sends.
    is_wanted, wants = own_receivers != [], own_receivers is None or dist.get_rank() in own_receivers
    moves = moves_along(changes, ranks, own_receivers) if is_wanted else []
    if group is not None and is_compared:
        asked = tuple([Asked(each.name, each.tensor.placements, each.placements) for each in changes])
        budget = agreed_budget(group, budget, asked, changes[0].tensor._local_tensor.device)
    asks = group is not None and most_bytes(moves, range(group.size())) > budget
    meshes = Meshes()
    wrong = [misfit(change.name, change.tensor, change.before, meshes) for change in changes]
    with span(f"redistribute {counted(len(changes), 'tensor')}"), share_problems(group, wrong, asks) as is_wrong:
        coordinate = mesh.get_coordinate() or []
        targets = []
        for change in changes:
            wanted = change.after.box(coordinate).length if wants else (0,)
            targets.append(change.tensor._local_tensor.new_empty(wanted, requires_grad=False))
        if not is_wanted:
            return targets
        team = Team.of(group, targets[0].device)
        schedule = kept_schedule(moves, dist.get_rank(), 1 if group is None else group.size())
        # Where even the largest rank's bytes fit the budget, ranks know without asking that it is one exchange.
        count = agreed_count(schedule, budget, team, is_wrong)[0] if asks else int(group is not None)
        sources = [change.tensor._local_tensor.detach() for change in changes]
        Exchanges(schedule, count, team).run(sources, targets if wants else [None] * len(changes))
        return targets


def ranks_along(mesh: DeviceMesh, axes: Sequence[int], here: Sequence[int]) -> Ranks:
    """Return the ranks of a slice of the mesh: those that differ from a coordinate on these axes only."""
    ranges = [range(mesh.size(axis)) if axis in axes else range(at, at + 1) for axis, at in enumerate(here)]
    members = mesh.mesh[tuple([slice(part.start, part.stop) for part in ranges])]
    return Ranks(members.flatten().tolist(), ranges)


def moves_along(changes: Iterable[Change], ranks: Ranks, receivers: Sequence[int] | None = None) -> list[Move]:
    """Return the moves of tensors on one mesh."""
    moves = []
    receiver_ranks = Ranks.of(receivers, (len(receivers),)) if receivers else None
    for change in changes:
        before, after = change.before, Side(change.after, ranks)
        if receiver_ranks is not None:
            sizes = (len(receiver_ranks.ranks),)
            whole = read_cuts((Replicate(),), None, len(before.shape), sizes).on(before.shape, sizes)
            after = Side(whole, receiver_ranks)
        moves.append(Move(Side(before, ranks), after, change.tensor.dtype.itemsize))
    return moves


Target = tuple["DeviceMesh", "Placements"]
AGREED = 256  # so many different redistributions of a group are remembered as compared
PLANS = 4  # so many plans of a world are remembered


def change_meshes(
    tensors: Sequence[DTensor], targets: Sequence[Target], budget: int, names: Sequence[str]
) -> list[DTensor]:
    """Redistribute tensors to other meshes. Collective over the ranks of all these meshes."""
    meshes = Meshes()
    key = tuple([_key(tensor, *target, meshes) for tensor, target in zip(tensors, targets)]), budget
    plan = _take_plan(key) or _MeshPlan.of(tensors, targets, budget, meshes)
    asked = tuple(
        [
            Asked(name, (tensor.placements, tuple(tensor.device_mesh.shape)), (placements, tuple(mesh.shape)))
            for name, tensor, (mesh, placements) in zip(names, tensors, targets)
        ]
    )
    smallest = agreed_budget(plan.group, budget, asked, tensors[0]._local_tensor.device)
    if smallest != plan.budget:
        asks = most_bytes(plan.moves, range(plan.group.size())) > smallest
        plan = plan._replace(budget=smallest, asks=asks)
    local_targets = []
    for tensor, shape in zip(tensors, plan.shapes):
        local_targets.append(torch.empty(shape, dtype=tensor.dtype, device=tensor._local_tensor.device))
    wrong: list[str | None] = []
    if any(tensor._local_tensor.shape != shape for tensor, shape in zip(tensors, plan.held)):
        wrong += [misfit(name, t, move.source.regions, meshes) for name, t, move in zip(names, tensors, plan.moves)]
    with (
        span(f"redistribute {counted(len(tensors), 'tensor')}"),
        share_problems(plan.group, wrong, plan.asks) as is_wrong,
    ):
        _exchange(tensors, plan, local_targets, is_wrong)
    _keep_plan(key, plan, tensors)
    return [dtensor_like(tensor, local, *target) for tensor, local, target in zip(tensors, local_targets, targets)]


def _key(tensor: DTensor, mesh: DeviceMesh, placements: Placements, meshes: Meshes) -> Any:
    """Return all that a tensor's plan depends on, as a key.

    It has the classes of the placements, since a subclass of Partial compares equal to it. It has no mesh: that would
    keep its process groups alive.
    """
    spec, source_mesh = tensor._spec, tensor.device_mesh
    ranks = meshes.ranks(source_mesh), meshes.ranks(mesh), source_mesh.device_type, mesh.device_type
    kinds = tuple(map(type, (*spec.placements, *placements)))
    local = tensor._local_tensor
    order = getattr(spec, "shard_order", None)
    return *ranks, spec.placements, order, placements, kinds, tensor.shape, tensor.dtype, local.device


class _MeshPlan(NamedTuple):
    """The plan of a redistribution between meshes on this rank, which serves all tensors with the same key.

    Attributes:
        shapes: of the local targets; outside of the new mesh as many dims of length 0, so that gradients can flow.
        held: the shapes that the local sources must have.
        group: over the ranks of all meshes.
        budget: the bytes that buffers may take.
        asks: True if several exchanges may be needed, so that ranks ask one another for their number; the same on all
            ranks.
        ready: the exchanges of the last run, if there was one.
    """

    moves: list[Move]
    shapes: list[tuple[int, ...]]
    held: list[tuple[int, ...]]
    group: ProcessGroup
    budget: int
    asks: bool
    ready: list[Exchanges]

    @staticmethod
    def of(tensors: Sequence[DTensor], targets: Sequence[Target], budget: int, meshes: Meshes) -> _MeshPlan:
        """Plan a redistribution, and log the plan."""
        moves = moves_across(tensors, targets, meshes)
        shapes, held = [], []
        for tensor, move, (mesh, _) in zip(tensors, moves, targets):
            before, after = meshes.view(tensor.device_mesh).coordinate, meshes.view(mesh).coordinate
            shapes.append((0,) * max(tensor.ndim, 1) if after is None else move.target.box(after).length)
            held.append(tuple(tensor._local_tensor.shape) if before is None else move.source.box(before).length)
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
        described = f"{counted(len(moves), 'tensor')} of {of_ranks(members)} from mesh to mesh"
        log_plan("redistribution_plan", lambda: described)
        return _MeshPlan(moves, shapes, held, group, budget, most_bytes(moves, members) > budget, [])


# For each world its plans by their keys, the latest last. A plan that is in use isn't there, so that two threads don't
# run the same exchanges.
_plans: WeakKeyDictionary[ProcessGroup, dict[Any, _MeshPlan]] = WeakKeyDictionary()


def _take_plan(key: Any) -> _MeshPlan | None:
    """Take a plan out of the remembered ones. None if there is none with this key, or its group was destroyed."""
    plan = _plans.get(distributed_c10d._get_default_group(), {}).pop(key, None)
    return plan if plan is not None and plan.group in distributed_c10d._world.pg_map else None


def _keep_plan(key: Any, plan: _MeshPlan, tensors: Sequence[DTensor]) -> None:
    """Remember a plan under its key, since a program that moves its model does so again and again. Large plans, and
    those of fake tensors, aren't remembered; of more than PLANS the oldest is forgotten."""
    if len(tensors) * plan.group.size() > KEPT or any(type(t._local_tensor) is not torch.Tensor for t in tensors):
        return
    known = _plans.setdefault(distributed_c10d._get_default_group(), {})
    known[key] = plan
    # A dict keeps the order in which keys were added: the first one is the oldest.
    while len(known) > PLANS:
        known.pop(next(iter(known)), None)


def moves_across(tensors: Sequence[DTensor], targets: Sequence[Target], meshes: Meshes) -> list[Move]:
    """Return each tensor's move to its new mesh."""
    moves = []
    for tensor, (mesh, placements) in zip(tensors, targets):
        _check(tensor, mesh, placements)
        shape, sizes = tuple(tensor.shape), meshes.view(mesh).sizes
        before = regions_of("the tensor", tensor, meshes)
        after = regions_on(placements, None, shape, sizes)
        ranks_before, ranks_after = meshes.ranks(tensor.device_mesh), meshes.ranks(mesh)
        moves.append(Move(Side(before, ranks_before), Side(after, ranks_after), tensor.dtype.itemsize))
    return moves


def dtensor_like(tensor: DTensor, local: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """Make a DTensor with the shape, strides and dtype of `tensor` from a local tensor, on a mesh with placements.
    Nothing is checked."""
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    return DTensor(local, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)


def _exchange(
    tensors: Sequence[DTensor], plan: _MeshPlan, local_targets: Sequence[torch.Tensor], is_wrong: bool
) -> None:
    """Run the exchanges of a plan, from the tensors into the local targets. Collective."""
    team = Team.of(plan.group, local_targets[0].device)
    # A rank may be in one of both meshes only.
    held, wanted = (
        [local if side.ranks.coordinate(team.rank) is not None else None for local, side in zip(locals_, sides)]
        for locals_, sides in (
            ([tensor._local_tensor.detach() for tensor in tensors], [move.source for move in plan.moves]),
            (local_targets, [move.target for move in plan.moves]),
        )
    )
    _ready(plan, team, is_wrong).run(held, wanted)


def _ready(plan: _MeshPlan, team: Team, is_wrong: bool) -> Exchanges:
    """Return the exchanges of a plan: those of the last run, if there are as many now; else new ones, which the plan
    keeps. Collective if the plan asks.

    It can't be remembered: one rank may have forgotten the plan when another has not, and ranks must ask together.
    """
    schedule = plan.ready[0].schedule if plan.ready else kept_schedule(plan.moves, team.rank, len(team.ranks))
    count = agreed_count(schedule, plan.budget, team, is_wrong)[0] if plan.asks else 1
    if [exchanges.count for exchanges in plan.ready] != [count]:
        plan.ready[:] = [Exchanges(schedule, count, team)]
    return plan.ready[0]


def _check_one_view(mesh: DeviceMesh, members: Sequence[int], meshes: Meshes) -> None:
    """Check that other ranks that take part don't have another slice of the same name.

    From a 2x2 mesh to `mesh["a"]`, ranks 0 and 1 each plan for a slice of their own, {0, 2} and {1, 3}, and would
    exchange by two different plans: wrong values, without an error.
    """
    # A root mesh is the same on all of its ranks. Of a slice, each rank has its own.
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
    """Check that no new placement is pending, and that both meshes are for one device type."""
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"A tensor can't get a pending reduction on another mesh; asked for {placements}.")
    if tensor.device_mesh.device_type != mesh.device_type:
        raise ValueError(
            f"A redistribution from one mesh to another stays on one type of device; asked for one from "
            f"{tensor.device_mesh.device_type} to {mesh.device_type}."
        )
