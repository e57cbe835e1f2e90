"""A tree of tensors on one mesh: all that moves goes in the same exchanges, along the axes that some tensor changes, by
the groups of the mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from ..distributed._mesh.state import group_names
from ..distributed._mesh.universe import find_group
from ..distributed._torch import span
from ..distributed.tensor._planner.regions import NotPlanned, Regions
from ..distributed.tensor._planner.search import crossed
from ..distributed.tensor._runner.at_hand import Site, at_hand, joint_axes
from ..distributed.tensor._runner.specs import read_cuts
from ..show.words import counted
from ._planner.routes import Move
from ._planner.schedule import kept_schedule
from ._planner.sides import Ranks, Side
from .descriptions import Meshes, misfit, regions_on
from .exchanges import Exchanges
from .groups import agreed_count, most_bytes
from .notes import one_fate
from .teams import Team

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from .targets import Placements


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
        team, device = Team.of(group), targets[0].device
        schedule = kept_schedule(moves, dist.get_rank(), 1 if group is None else group.size())
        # Where all that there is fits the budget, ranks know without asking that it is one exchange.
        count = agreed_count(schedule, budget, team, device, is_wrong)[0] if asks else int(group is not None)
        sources = [change.tensor._local_tensor.detach() for change in changes]
        Exchanges(schedule, count, team, device).run(sources, targets if wants else [None] * len(changes))
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
