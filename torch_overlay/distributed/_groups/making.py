"""The process group of an axis of a mesh: how it is asked for, and made if it isn't there."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed import DistError, distributed_c10d
from torch.distributed.distributed_c10d import GroupMember, ProcessGroup

from .. import config
from .._mesh.rank_map import of_ranks
from .._mesh_layout import _FlatLayout
from .._torch import for_mesh
from ..distributed_c10d import _timeout_of
from .names import compact
from .settings import get_settings, makes_communicators, members_create
from .table import Entry, Key, Kind, describe
from .universe import Universe, making_private
from .waits import SWITCH, explained

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from .._mesh.input import Override
    from .._mesh.rank_map import View


logger = logging.getLogger(__name__)


@dataclass
class GroupCounters:  # overlay only
    """What happened to group requests in this process.

    Attributes:
        made: groups that this rank is in, made for a mesh.
        shared: requests answered with a group that was there.
        calls: calls of torch's group constructors.
    """

    made: int = 0
    shared: int = 0
    calls: int = 0


_counted = GroupCounters()  # overlay only


def counters() -> dict[str, int]:  # overlay only
    """What was counted in this process, by what it is."""
    return {
        "process groups made for meshes": _counted.made,
        "requests served by a shared group": _counted.shared,
        "calls of torch's group constructors": _counted.calls,
    }


@dataclass(frozen=True)
class Request:
    """A view of one axis that wants its group.

    Attributes:
        view: of the one axis.
        name: what the axis is called.
        override: the backend and options that the user gave for it.
        device_type: the mesh's.
        joint: whether the group is for redistributions over several axes, and not for an axis that the user made.
    """

    view: View
    name: str
    override: Override
    device_type: str
    joint: bool = False


def axis_group(universe: Universe, request: Request) -> ProcessGroup | None:
    """The group of this rank along one axis: shared if it was made, else created; None on a rank outside the mesh.

    Collective: where the backend lets members create alone, the members call it; else every rank of the world does.

    Raises:
        RuntimeError: a member didn't take part within the timeout, or the group was made and then destroyed, where
            not only its members make it.
    """
    world = distributed_c10d._get_default_group()
    if _default_serves(world, universe, request):
        _counted.shared += 1  # overlay only
        universe.by_default.setdefault(request.name)  # overlay only
        return world
    alone = members_create(world, request.override[0])
    table, keys = universe.table, _keys(request, _copies(request.view, alone))
    if _shares_nothing(universe, request):
        keys = [table.next_number(key) for key in keys]
    if alone:
        for key in keys:
            table.forget_gone(key)
    calls = _counted.calls  # overlay only
    found = table.get_or_make(keys, lambda missing: new_groups(request, missing, alone))
    mine = next((entry for entry in found if entry.group_name), None)
    _note_override(universe, request, mine)
    if mine is None:
        return None
    _counted.made += _counted.calls > calls  # overlay only
    _counted.shared += _counted.calls == calls  # overlay only
    _note_apart(mine, universe)
    return _named(mine, request)


def _copies(view: View, alone: bool) -> list[list[int]]:
    """The ranks of each group that this rank asks for. If members make it ``alone``, that is its own copy of the axis,
    and none outside; else all copies, since every rank of the world takes part in making each.

    On a 2 x 4 mesh, rank 5 asks for [[4, 5, 6, 7]] along the inner axis, or for [[0, 1, 2, 3], [4, 5, 6, 7]].
    """
    rank = distributed_c10d.get_rank()
    if not alone:
        return [view.ranks(view.rank_map[start]) for start in view.copies()]
    return [view.ranks(rank)] if view.coordinate(rank) is not None else []


def _default_serves(world: ProcessGroup, universe: Universe, request: Request) -> bool:
    """Whether the axis gets the default group, as an axis does that is the whole world.

    Beside a gloo default group, a mesh of other devices than CPUs has a group of its own, as it had before. What the
    mesh is for decides, and not what this host has, which may differ from host to host.
    """
    if request.joint or universe.private or making_private.get() or not _covers_world(request, world.size()):
        return False
    return request.device_type == "cpu" or distributed_c10d.get_backend(world) != "gloo"


def _covers_world(request: Request, world_size: int) -> bool:
    """Whether the axis is the whole world in rank order."""
    view = request.view
    if view.layout.numel() != world_size or request.override != (None, None):
        return False
    if view.layout.axes[0] == _FlatLayout((world_size,)) and view.rank_map.is_identity:
        return True  # without a list as long as the world
    return view.ranks(view.rank_map[0]) == list(range(world_size))


def _keys(request: Request, copies: Sequence[Sequence[int]]) -> list[Key]:
    """The keys of all copies, with the name under which the options let the axis share."""
    policy = get_settings().mesh_share_groups
    # A group of one rank is no communicator. With one for each name, a loop that destroys the groups of all axes works.
    named = policy in ("names", "off") or request.view.layout.numel() == 1
    name, kind = request.name if named and not request.joint else None, Kind.of(request.override)
    return [Key(compact(ranks), kind, name) for ranks in copies]


def _shares_nothing(universe: Universe, request: Request) -> bool:
    """Whether an axis gets a group that no other axis ever gets, not even one of the same universe."""
    if request.joint:
        return False
    return get_settings().mesh_share_groups == "off" or (making_private.get() and not universe.private)


def _note_override(universe: Universe, request: Request, mine: Entry | None) -> None:
    """Note the backend and options of an axis, for groups over several axes, which need equal ones."""
    axis = request.name, request.view.layout.axes[0]
    universe.overrides[mine.group_name if mine else axis] = request.override


def _note_apart(entry: Entry, universe: Universe) -> None:
    """Note that one view alone has the group; `mark_apart` notes which, once the view is made."""
    if making_private.get() and not universe.private:
        entry.apart = ""


def _named(entry: Entry, request: Request) -> ProcessGroup | None:
    group = entry.group
    entry.serves_axis |= not request.joint
    if group is not None and request.name not in entry.names:
        entry.names.append(request.name)
        if len(entry.names) > 1:
            group._set_group_desc(description(entry.names))
    return group


def description(names: Sequence[str]) -> str:
    """What c10d calls the group of axes of these names, in its logs and its flight recorder; a group over several axes
    is called as if they were flattened.

    >>> description(["tp"]), description(["dp,tp"]), description(["dp_shard_cp", "fsdp"])
    ('mesh_tp', 'mesh_dp_tp', 'mesh_dp_shard_cp,fsdp')
    """
    return "mesh_" + ",".join(dict.fromkeys([name.replace(",", "_") for name in names]))


def new_groups(request: Request, copies: list[list[int]], alone: bool) -> list[ProcessGroup | None]:
    """New groups over the ranks of each copy of an axis. With ``alone`` only the members call this, and ``copies``
    holds just their own ranks."""
    with explained(lambda: _wait(request, copies, alone)):
        made = _make(request, copies, alone)
    for ranks, group in zip(copies, made, strict=True):
        if group is not None and logger.isEnabledFor(logging.DEBUG):
            logger.debug("made %s, the process group %r of %s", group.group_desc, group.group_name, of_ranks(ranks))
    return made


def _wait(request: Request, copies: list[list[int]], alone: bool) -> tuple[str, list[int]]:
    """What other ranks are to do, and which of them, the group's own first."""
    mine = next((ranks for ranks in copies if distributed_c10d.get_rank() in ranks), copies[0])
    mesh = request.view.rank_map.ranks() if alone else range(distributed_c10d.get_world_size())
    return f"make the process group of {describe([request.name])} over {of_ranks(mine)}", [*mine, *mesh]


def _make(request: Request, copies: list[list[int]], alone: bool) -> list[ProcessGroup | None]:
    if not alone and _can_split(distributed_c10d._get_default_group(), request, copies):
        made = _split(request, copies)
        return [made if distributed_c10d.get_rank() in ranks else None for ranks in copies]
    return [_new_group(request, ranks, alone) for ranks in copies]


def _new_group(request: Request, ranks: list[int], alone: bool) -> ProcessGroup | None:
    backend, options = request.override
    _counted.calls += 1  # overlay only
    try:
        group = for_mesh(distributed_c10d.new_group)(
            ranks=ranks,
            timeout=_timeout(request),
            backend=backend,
            pg_options=_own(options),
            use_local_synchronization=alone,
            group_desc=description([request.name]),
            sort_ranks=ranks == sorted(ranks),  # torchcomms can't keep an order, and sorted ranks don't ask for it
        )
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, DistError):
            raise  # keep the type, so that callers who catch this subclass still do
        raise type(error)(
            f"Rank {distributed_c10d.get_rank()} could not make the process group of mesh {describe([request.name])}, "
            f"which needs all of {of_ranks(ranks)}: {str(error).removesuffix('.')}. If some of them were out of reach, "
            f"see whether they died or build another mesh; {SWITCH} compares meshes first."
        ) from error
    return None if group == GroupMember.NON_GROUP_MEMBER else cast("ProcessGroup | None", group)


def _own(options: Any) -> Any:
    """A group's own copy of the options that the user gave, into which c10d writes the group's name and ranks; of
    options that can't be copied, as gloo's, these."""
    for copied in (copy.copy, copy.deepcopy):  # NCCL's know the second way only
        try:
            return copied(options)
        except Exception:  # whatever a backend's options raise
            continue
    return options


def _timeout(request: Request) -> timedelta | None:
    """The timeout that the user gave for the axis, else the default group's; None where a backend doesn't say."""
    options = request.override[1]
    return options._timeout if options is not None else _timeout_of(distributed_c10d._get_default_group())


def _can_split(world: ProcessGroup, request: Request, copies: list[list[int]]) -> bool:
    """Whether one split of the default group gives all the groups.

    The world must be bound to a device and its backend must be able to; a split may sort its ranks. Of a world that
    isn't bound the mesh's type of device decides, and not what this host has, which may differ from host to host.
    """
    device, backend = world.bound_device_id or torch.device(request.device_type), request.override[0]
    if not makes_communicators(world) or (world.bound_device_id is None and device.type == "cpu"):
        return False
    parent = world._get_backend(device)
    if backend is not None and parent.name() != backend:
        return False
    splits = config.use_torchcomms or parent.supports_splitting
    return splits and all(ranks == sorted(ranks) for ranks in copies)


def _split(request: Request, copies: list[list[int]]) -> ProcessGroup | None:
    _counted.calls += 1  # overlay only
    made = distributed_c10d.split_group(
        parent_pg=distributed_c10d._get_default_group(),
        timeout=_timeout(request),
        pg_options=_own(request.override[1]),
        split_ranks=copies,
        group_desc=description([request.name]),
    )
    return None if made is None or made == GroupMember.NON_GROUP_MEMBER else made
