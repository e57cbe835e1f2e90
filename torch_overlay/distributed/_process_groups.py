"""Process groups of meshes: look the group up, else create it. Nobody else creates groups for a mesh."""

from __future__ import annotations

import contextlib
import contextvars
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed import config as dist_config
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupMember, ProcessGroup

from ._group_table import GroupTable, group_table, making_for_mesh, needs_device_group
from ._layout import Layout
from ._rank_map import short
from ._settings import get_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from ._mesh_input import Override
    from ._view import View

_private: contextvars.ContextVar[bool] = contextvars.ContextVar("private_groups", default=False)


@dataclass
class GroupCounters:
    """What happened to group requests in this process since the last reset.

    Attributes:
        made: groups that this rank is in, made for a mesh.
        shared: requests answered with a group that was there.
        calls: calls of torch's group constructors.
    """

    made: int = 0
    shared: int = 0
    calls: int = 0


_counted = GroupCounters()


def counters() -> dict[str, int]:
    """What was counted in this process, by what it is."""
    return {
        "process groups made for meshes": _counted.made,
        "requests served by a shared group": _counted.shared,
        "calls of torch's group constructors": _counted.calls,
    }


@contextlib.contextmanager
def private_groups() -> Iterator[None]:
    """Give the meshes made inside groups that nobody shares, for one block of code.

    Collectives on one group run one after the other; two that should overlap need a group each.

    >>> with private_groups():  # doctest: +SKIP
    ...     second = init_device_mesh("cpu", (8,))  # its all-gathers run beside those of the first mesh
    """
    token = _private.set(True)
    try:
        yield
    finally:
        _private.reset(token)


@dataclass(frozen=True)
class Request:
    """One axis of a mesh that wants its group.

    Attributes:
        view: the mesh's view, for its rank map.
        axis: the layout of the axis.
        name: what the axis is called, for people.
        override: the backend and options that the user gave for it.
        device_type: the mesh's, for finding the timeout of the default group.
    """

    view: View
    axis: Layout
    name: str
    override: Override
    device_type: str

    def ranks(self, start: int) -> list[int]:
        """The ranks of the copy of the axis that starts at this index, in the mesh's order."""
        return [self.view.rank_map[start + offset] for offset in self.axis.indices()]

    def own_start(self, rank: int) -> int | None:
        """Where the copy that holds ``rank`` starts; None on a rank outside."""
        index = self.view.rank_map.index(rank)
        return None if index is None else index - self.axis(self.axis.coordinate(index))

    def covers_world(self, world_size: int) -> bool:
        """Whether the axis is the whole world in rank order, which the default group serves."""
        if self.axis.numel != world_size or self.override != (None, None):
            return False
        if self.axis == Layout((world_size,)) and self.view.rank_map.is_identity:
            return True
        return self.ranks(0) == list(range(world_size))


def axis_group(request: Request) -> ProcessGroup | None:
    """The group of this rank along one axis: shared if it was made, else created; None on a rank outside the mesh.

    Collective: where the backend lets members create alone, the members call it; else every rank of the world does.

    Raises:
        RuntimeError: a member didn't take part within the timeout.
    """
    world = distributed_c10d._get_default_group()
    private = _private.get()
    if not private and get_settings().share_groups and request.override == (None, None):
        group_table().remember(request.view.rank_map, request.axis)
    if not private and request.covers_world(world.size()) and not needs_device_group(world):
        _counted.shared += 1
        return world
    if members_create(world, request.override[0]):
        start = request.own_start(distributed_c10d.get_rank())
        return None if start is None else _group_of(request, request.ranks(start), private, members=True)
    return _groups_of_all(request, private)


def members_create(world: ProcessGroup, backend: str | None) -> bool:
    """Whether the members of a group can make it without the others.

    MPI can't; a device-bound NCCL world splits, in which all ranks take part; torchcomms has its own way.
    """
    if get_settings().create != "members" or getattr(dist_config, "use_torchcomms", False):
        return False
    return world.bound_device_id is None and (backend or distributed_c10d.get_backend(world)).lower() != "mpi"


def _group_of(request: Request, ranks: list[int], private: bool, members: bool) -> ProcessGroup | None:
    table = group_table()
    share = get_settings().share_groups and not private
    key = table.key(ranks, request.override)
    if share:
        made, group = table.find(key)
        if made:
            if group is not None:
                _counted.shared += 1
                _add_name(table, group, request.name)
            return group
    group = _new_group(request, ranks, members)
    if share:
        table.groups[key] = group
    if group is not None:
        _counted.made += 1
        table.names[group.group_name] = [request.name]
    return group


def _add_name(table: GroupTable, group: ProcessGroup, name: str) -> None:
    names = table.names.setdefault(group.group_name, [])
    if name not in names:
        names.append(name)
        group._set_group_desc("mesh_" + ",".join(names))


def _new_group(request: Request, ranks: list[int], members: bool) -> ProcessGroup | None:
    backend, options = request.override
    _counted.calls += 1
    token = making_for_mesh.set(True)
    try:
        group = distributed_c10d.new_group(
            ranks=ranks,
            timeout=_timeout(request),
            backend=backend,
            pg_options=options,
            use_local_synchronization=members,
            group_desc=f"mesh_{request.name}",
            sort_ranks=False,
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"The process group of mesh axis {request.name!r} needs all of ranks {short(ranks)}, and rank "
            f"{distributed_c10d.get_rank()} could not reach them: {error}. See whether one of them died or builds "
            "another mesh (the option check_mesh compares them)."
        ) from error
    finally:
        making_for_mesh.reset(token)
    return None if group is None or group == GroupMember.NON_GROUP_MEMBER else group


def _timeout(request: Request) -> timedelta | None:
    """The timeout that the user gave for the axis, else the default group's; None where a backend doesn't say."""
    options = request.override[1]
    if options is not None:
        return options._timeout
    world = distributed_c10d._get_default_group()
    for device_type in (request.device_type, "cpu"):
        try:
            inherited = world._get_backend(torch.device(device_type)).options
            return inherited._timeout
        except (RuntimeError, AttributeError):
            continue
    return None


def _groups_of_all(request: Request, private: bool) -> ProcessGroup | None:
    """Every rank makes, or takes part in making, the group of every copy of the axis."""
    copies = [request.ranks(start) for start in request.view.copies(request.axis)]
    if _can_split(distributed_c10d._get_default_group(), request.override[0], copies):
        return _split(request, copies, private)
    table = group_table()
    keys = [table.key(ranks, request.override) for ranks in copies]
    known = [table.find(key)[0] for key in keys]
    if not all(known):
        # The copies are made together, so they are missed together: only members see that a group was destroyed.
        for key in keys:
            table.groups.pop(key, None)
    mine: ProcessGroup | None = None
    for ranks in copies:
        group = _group_of(request, ranks, private, members=False)
        if distributed_c10d.get_rank() in ranks:
            mine = group
    return mine


def _can_split(world: ProcessGroup, backend: str | None, copies: list[list[int]]) -> bool:
    """Whether one split of the default group gives all the groups.

    The world must be bound to a device and its backend must be able to; torch sorts a split's ranks up to 2.13.
    """
    torchcomms = getattr(dist_config, "use_torchcomms", False)
    if (world.bound_device_id is None and not torchcomms) or not torch.accelerator.is_available():
        return False
    parent = world._get_backend(torch.accelerator.current_accelerator())
    if backend is not None and parent.name() != backend:
        return False
    return (torchcomms or parent.supports_splitting) and all(ranks == sorted(ranks) for ranks in copies)


def _split(request: Request, copies: list[list[int]], private: bool) -> ProcessGroup | None:
    table = group_table()
    share = get_settings().share_groups and not private
    keys = [table.key(ranks, request.override) for ranks in copies]
    mine = next((key for key in keys if distributed_c10d.get_rank() in key[0]), None)
    if share and all(table.find(key)[0] for key in keys):
        _counted.shared += mine is not None
        return None if mine is None else table.groups[mine]
    _counted.calls += 1
    made = distributed_c10d.split_group(
        parent_pg=distributed_c10d._get_default_group(),
        timeout=_timeout(request),
        pg_options=request.override[1],
        split_ranks=copies,
        group_desc=f"mesh_{request.name}",
    )
    group = None if made is None or made == GroupMember.NON_GROUP_MEMBER else made
    if share:
        table.groups.update(dict.fromkeys(keys))
        if mine is not None:
            table.groups[mine] = group
    _counted.made += group is not None
    return group
