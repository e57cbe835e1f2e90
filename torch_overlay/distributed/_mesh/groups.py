"""The process groups of a mesh: found or made with the mesh, found by name afterwards,
aborted together.

Start at `make_own_groups`, which a new mesh calls, or at `axis_group`, which decides
whether an axis gets the default group, a group that its universe has, or a new one.
"""

from __future__ import annotations

import copy
import itertools
import logging
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed import DistError, device_mesh, distributed_c10d
from torch.distributed.distributed_c10d import GroupMember, ProcessGroup

from .. import config
from .._mesh_layout import _FlatLayout, _MeshLayout
from .._torch import for_mesh
from ..distributed_c10d import _timeout_of, compact
from .caches import forget_shardings, forget_views
from .compare import SWITCH, check_same_mesh, explained, leave_line
from .pickling import UNBOUND
from .state import axis_names, group_names, is_apart, shared_state, view_of
from .text import axes_text, of_ranks, ranks_text
from .universe import (
    Entry,
    Key,
    Kind,
    Universe,
    current_world,
    find_group,
    get_settings,
    join_universe,
    made_private,
    makes_communicators,
    making_private,
    members_create,
    universe_of,
    warn_outside_of_blocks,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import timedelta

    from torch.distributed.device_mesh import DeviceMesh

    from .arguments import Override
    from .rank_map import View
    from .state import SharedState


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
        joint: whether the group is for redistributions over several axes, and not for
            an axis that the user made.
    """

    view: View
    name: str
    override: Override
    device_type: str
    joint: bool = False


def axis_group(universe: Universe, request: Request) -> ProcessGroup | None:
    """The group of this rank along one axis: shared if it was made, else created; None
    on a rank outside the mesh.

    Collective: where the backend lets members create alone, the members call it; else
    every rank of the world does.

    Raises:
        RuntimeError: a member didn't take part within the timeout, or the group was
            made and then destroyed, where not only its members make it.
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
    """The ranks of each group that this rank asks for. If members make it ``alone``,
    that is its own copy of the axis, and none outside; else all copies, since every
    rank of the world takes part in making each.

    On a 2 x 4 mesh, rank 5 asks for [[4, 5, 6, 7]] along the inner axis, or for [[0, 1,
    2, 3], [4, 5, 6, 7]].
    """
    rank = distributed_c10d.get_rank()
    if not alone:
        return [view.ranks(view.rank_map[start]) for start in view.copies()]
    return [view.ranks(rank)] if view.coordinate(rank) is not None else []


def _default_serves(world: ProcessGroup, universe: Universe, request: Request) -> bool:
    """Whether the axis gets the default group, as an axis does that is the whole world.

    Beside a gloo default group, a mesh of other devices than CPUs has a group of its
    own, as it had before. What the mesh is for decides, and not what this host has,
    which may differ from host to host.
    """
    if (
        request.joint
        or universe.private
        or making_private.get()
        or not _covers_world(request, world.size())
    ):
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
    """The keys of all copies, with the name under which the options let the axis
    share."""
    policy = get_settings().mesh_share_groups
    # A group of one rank is no communicator. With one for each name, a loop that
    # destroys the groups of all axes works.
    named = policy in ("names", "off") or request.view.layout.numel() == 1
    name, kind = (
        request.name if named and not request.joint else None,
        Kind.of(request.override),
    )
    return [Key(compact(ranks), kind, name) for ranks in copies]


def _shares_nothing(universe: Universe, request: Request) -> bool:
    """Whether an axis gets a group that no other axis ever gets, not even one of the
    same universe."""
    if request.joint:
        return False
    return get_settings().mesh_share_groups == "off" or (
        making_private.get() and not universe.private
    )


def _note_override(universe: Universe, request: Request, mine: Entry | None) -> None:
    """Note the backend and options of an axis, for groups over several axes, which need
    equal ones."""
    axis = request.name, request.view.layout.axes[0]
    universe.overrides[mine.group_name if mine else axis] = request.override


def _note_apart(entry: Entry, universe: Universe) -> None:
    """Note that one view alone has the group; `mark_apart` notes which, once the view
    is made."""
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
    """What c10d calls the group of axes of these names, in its logs and its flight
    recorder; a group over several axes is called as if they were flattened.

    >>> description(["tp"]), description(["dp,tp"]), description(["dp_cp", "fsdp"])
    ('mesh_tp', 'mesh_dp_tp', 'mesh_dp_cp,fsdp')
    """
    return "mesh_" + ",".join(dict.fromkeys([name.replace(",", "_") for name in names]))


def new_groups(
    request: Request, copies: list[list[int]], alone: bool
) -> list[ProcessGroup | None]:
    """New groups over the ranks of each copy of an axis. With ``alone`` only the
    members call this, and ``copies`` holds just their own ranks."""
    with explained(lambda: _wait(request, copies, alone)):
        made = _make(request, copies, alone)
    for ranks, group in zip(copies, made, strict=True):
        if group is not None and logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "made %s, the process group %r of %s",
                group.group_desc,
                group.group_name,
                of_ranks(ranks),
            )
    return made


def _wait(
    request: Request, copies: list[list[int]], alone: bool
) -> tuple[str, list[int]]:
    """What other ranks are to do, and which of them, the group's own first."""
    mine = next(
        (ranks for ranks in copies if distributed_c10d.get_rank() in ranks), copies[0]
    )
    mesh = (
        request.view.rank_map.ranks()
        if alone
        else range(distributed_c10d.get_world_size())
    )
    return (
        f"make the process group of {axes_text([request.name])} over {of_ranks(mine)}",
        [*mine, *mesh],
    )


def _make(
    request: Request, copies: list[list[int]], alone: bool
) -> list[ProcessGroup | None]:
    if not alone and _can_split(distributed_c10d._get_default_group(), request, copies):
        made = _split(request, copies)
        return [
            made if distributed_c10d.get_rank() in ranks else None for ranks in copies
        ]
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
            # torchcomms can't keep an order, and sorted ranks don't ask for it
            sort_ranks=ranks == sorted(ranks),
        )
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, DistError):
            raise  # keep the type, so that callers who catch this subclass still do
        raise type(error)(
            f"Rank {distributed_c10d.get_rank()} could not make the process group of "
            f"mesh {axes_text([request.name])}, "
            f"which needs all of {of_ranks(ranks)}: {str(error).removesuffix('.')}. "
            "If some of them were out of reach, "
            f"see whether they died or build another mesh; {SWITCH} compares meshes "
            "first."
        ) from error
    return (
        None
        if group == GroupMember.NON_GROUP_MEMBER
        else cast("ProcessGroup | None", group)
    )


def _own(options: Any) -> Any:
    """A group's own copy of the options that the user gave, into which c10d writes the
    group's name and ranks; of options that can't be copied, as gloo's, these."""
    for copied in (copy.copy, copy.deepcopy):  # NCCL's know the second way only
        try:
            return copied(options)
        except Exception:  # whatever a backend's options raise
            continue
    return options


def _timeout(request: Request) -> timedelta | None:
    """The timeout that the user gave for the axis, else the default group's; None where
    a backend doesn't say."""
    options = request.override[1]
    return (
        options._timeout
        if options is not None
        else _timeout_of(distributed_c10d._get_default_group())
    )


def _can_split(world: ProcessGroup, request: Request, copies: list[list[int]]) -> bool:
    """Whether one split of the default group gives all the groups.

    The world must be bound to a device and its backend must be able to; a split may
    sort its ranks. Of a world that isn't bound the mesh's type of device decides, and
    not what this host has, which may differ from host to host.
    """
    device, backend = (
        world.bound_device_id or torch.device(request.device_type),
        request.override[0],
    )
    if not makes_communicators(world) or (
        world.bound_device_id is None and device.type == "cpu"
    ):
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


def make_own_groups(mesh: DeviceMesh, overrides: Sequence[Override]) -> None:
    """Give a new mesh the groups of its axes, and those that redistributions over
    several axes use.

    If it is a root and made inside a block of `private_groups`, its universe is
    private.
    """
    shared = shared_state(mesh)
    if making_private.get() and mesh._root_mesh is None:
        shared.private = current_world().next_private(shared.rank_map)
    mesh._dim_group_names = make_groups(
        mesh, view_of(mesh).layout, mesh._mesh_dim_names, overrides
    )
    make_joint_groups(mesh)


def make_groups(
    mesh: DeviceMesh,
    layout: _MeshLayout,
    names: Sequence[str] | None,
    overrides: Sequence[Override],
) -> list[str]:
    """The name of this rank's group on each axis of ``layout``, made where there is
    none; [] on a rank outside. Axes that a view of `is_apart` gets share no group
    either."""
    if is_apart(mesh):
        with made_private():
            return _find_or_make(mesh, layout, names, overrides)
    return _find_or_make(mesh, layout, names, overrides)


def _find_or_make(
    mesh: DeviceMesh,
    layout: _MeshLayout,
    names: Sequence[str] | None,
    overrides: Sequence[Override],
) -> list[str]:
    leave_line(lambda: _describe(mesh, layout, names, overrides))
    check_same_mesh(lambda: _describe(mesh, layout, names, overrides))
    shared = shared_state(mesh)
    if shared.private is None:
        warn_outside_of_blocks()
    universe = universe_of(shared)
    found: list[str] = []
    for axis, name, override in zip(
        layout.axes, axis_names(names, len(layout.axes)), overrides, strict=True
    ):
        view = view_of(mesh).show(_MeshLayout((axis,)))
        group = axis_group(universe, Request(view, name, override, mesh._device_type))
        if group is not None:
            shared.registry[group.group_name] = group
            found.append(group.group_name)
    return found


def make_joint_groups(mesh: DeviceMesh) -> None:
    """The group over all axes of a new mesh, if mesh_joint_groups asks for it; none of
    a view of `is_apart`."""
    large = _large(mesh)
    if len(large) > 1 and not is_apart(mesh) and _brings_joint():
        _make_joint(mesh, [large])


def _brings_joint() -> bool:
    """Whether a new mesh brings a group over all its axes. With sharing off it brings
    none: all views of a universe would share it."""
    if (
        get_settings().mesh_joint_groups == "existing"
        or get_settings().mesh_share_groups == "off"
    ):
        return False
    # A communicator takes memory as soon as it is made, so it must be asked for.
    return not makes_communicators(distributed_c10d._get_default_group())


def prepare(mesh: DeviceMesh) -> None:  # overlay only
    """Make a group for each set of two or more axes of a mesh, which redistributions
    over them then use.

    Collective: all ranks of the mesh call it, and all ranks of the world where these
    make every group. A mesh of n axes of more than one rank has 2^n - n - 1 such sets.
    On NCCL a group takes memory from its first collective on.

    Raises:
        RuntimeError: the mesh has no groups, is a private view of a mesh that isn't
            private, or a member didn't take part within the timeout.

    Then P,P,S0 -> R,R,R takes two collectives:

    >>> prepare(mesh["dp", "cp", "tp"])  # doctest: +SKIP
    """
    if group_names(mesh) is None:
        raise RuntimeError(
            f"prepare needs a mesh with process groups, and {mesh} was made without"
        )
    if is_apart(mesh):
        raise RuntimeError(
            f"prepare makes groups that all views of a mesh share, and {mesh} was "
            "made inside private_groups() from a "
            "mesh that isn't private. Make the root mesh inside, and prepare that."
        )
    leave_line(lambda: f"prepare({mesh})")
    _make_joint(mesh, sets_of_axes(mesh))
    universe = universe_of(shared_state(mesh))
    made = {
        key for axes in sets_of_axes(mesh) if (key := _joint_key(mesh, universe, axes))
    }
    universe.version += len(made - universe.asked_for)
    universe.asked_for |= made


def _large(mesh: DeviceMesh) -> tuple[int, ...]:
    """The axes of more than one rank."""
    return tuple(
        axis
        for axis, size in enumerate(view_of(mesh).layout.top_level_sizes)
        if size > 1
    )


def sets_of_axes(mesh: DeviceMesh) -> Iterable[tuple[int, ...]]:
    """Each set of two or more axes of a mesh, without those of one rank."""
    axes = _large(mesh)
    return itertools.chain.from_iterable(
        itertools.combinations(axes, count) for count in range(2, len(axes) + 1)
    )


def _make_joint(mesh: DeviceMesh, subsets: Iterable[tuple[int, ...]]) -> None:
    """Make the group over each of these sets of axes that isn't there. Collective, as
    `axis_group` is."""
    universe, view = universe_of(shared_state(mesh)), view_of(mesh)
    names = axis_names(mesh._mesh_dim_names, len(view.layout.axes))
    for axes in subsets:
        key = _joint_key(mesh, universe, axes)
        if key is None or key in universe.joint:
            continue
        name, override = (
            ",".join(names[axis] for axis in axes),
            override_of(mesh, universe, axes[0]),
        )
        axis = view.show(_MeshLayout((key[0],)))
        group = axis_group(
            universe, Request(axis, name, override, mesh._device_type, joint=True)
        )
        universe.joint[key] = group.group_name if group is not None else ""
        universe.version += 1


def override_of(mesh: DeviceMesh, universe: Universe | None, axis: int) -> Override:
    """The backend and options that an axis of a mesh has; of a group that wasn't made
    here, its backend."""
    held = group_names(mesh)
    known = universe.overrides if universe is not None else {}
    # A rank outside must ask for the same groups as the members, since all ranks may
    # have to make them together.
    if not held:
        axes = view_of(mesh).layout.axes
        return known.get(
            (axis_names(mesh._mesh_dim_names, len(axes))[axis], axes[axis]),
            (None, None),
        )
    if held[axis] in known:
        return known[held[axis]]
    group = find_group(held[axis])
    if group is None or group is distributed_c10d._get_default_group():
        return (None, None)
    return (distributed_c10d.get_backend(group), None)


def _joint_key(
    mesh: DeviceMesh, universe: Universe | None, axes: Sequence[int]
) -> tuple[_FlatLayout, Kind] | None:
    """What a group over several axes of a mesh is known by: the indices that it holds,
    in ascending order, and what it can do. None for axes whose groups can do different
    things, which can't be joined."""
    kinds = {Kind.of(override_of(mesh, universe, axis)) for axis in axes}
    return (
        (view_of(mesh).layout.select(axes).collapse().ascending(), kinds.pop())
        if len(kinds) == 1
        else None
    )


def joint_group_name(mesh: DeviceMesh, axes: Sequence[int]) -> str | None:
    """The name of the group over several axes of a mesh, in whatever order it holds
    their ranks; None if there is none, and for a view of `is_apart`.

    All ranks of the mesh find the same group, or none, since it follows from the mesh
    calls of this universe and the options: a group that was made for redistributions,
    else that of a view that somebody flattened, on the backend and with the options
    that the axes have. On a rank outside it is "" for a group that was made, else None.
    """
    shared = shared_state(mesh)
    join_universe(shared)
    universe = shared.universe
    key = None if is_apart(mesh) else _joint_key(mesh, universe, axes)
    if key is None:
        return None
    usable = get_settings().mesh_joint_groups != "existing"
    asked = universe is not None and key in universe.asked_for  # overlay only
    usable = usable or asked  # overlay only
    if usable and universe is not None and key in universe.joint:
        return universe.joint[key]
    return _flattened_group(shared, key)


def _flattened_group(shared: SharedState, key: tuple[_FlatLayout, Kind]) -> str | None:
    """The name of the group of a flattened view, that of the first name in order."""
    # What we make a group for doesn't run in the default group, beside the user's own
    # collectives.
    existing = get_settings().mesh_joint_groups == "existing"
    default = None if existing else distributed_c10d._get_default_group().group_name
    for _, flattened in sorted(shared.flattened.items(), key=lambda item: str(item[0])):
        names = group_names(flattened)
        if (
            not names
            or names[0].startswith(UNBOUND)
            or names[0] == default
            or is_apart(flattened)
        ):
            continue
        if _joint_key(flattened, shared.universe, (0,)) == key:
            return names[0]
    return None


def joint_groups_known(mesh: DeviceMesh) -> tuple[Any, ...]:
    """Part of every cache's key, beside the options: it changes when `joint_group_name`
    may answer differently.

    A new flattened view changes it even if no group was made, since the group that it
    has may serve from now on. Under the same name an equal mesh may have another view,
    over other axes or with a group of its own. A view of `is_apart` has no such group,
    and a slice of it may equal one of the root mesh otherwise.
    """
    if is_apart(mesh):
        return ("apart",)
    shared = shared_state(mesh)
    join_universe(shared)
    universe = shared.universe
    made = (universe.serial, universe.version) if universe is not None else ()
    flattened = [
        (name, *(group_names(v) or ())) for name, v in list(shared.flattened.items())
    ]
    return (*made, *flattened)


def _describe(
    mesh: DeviceMesh,
    layout: _MeshLayout,
    names: Sequence[str] | None,
    overrides: Sequence[Override],
) -> str:
    """One line about axes that are about to get groups, for ranks to compare; of
    options, that there are some."""
    rank_map = view_of(mesh).rank_map
    axes = (
        [
            f"{name}={size}"
            for name, size in zip(names, layout.top_level_sizes, strict=True)
        ]
        if names
        else layout.top_level_sizes
    )
    ranks = f"0 to {rank_map.numel - 1}"
    if not rank_map.is_identity:
        ranks = f"{ranks_text(rank_map.ranks())} #{rank_map.key[1][:8]}"
    asked = [
        f"{backend or ''}{'+options' if options else ''}"
        for backend, options in overrides
    ]
    backends = f", backends {asked}" if any(asked) else ""
    strides = ", ".join(str(axis) for axis in layout.axes)
    traits = ", private" if shared_state(mesh).private or making_private.get() else ""
    traits += ", preserve_rank_order" if mesh._preserve_rank_order else ""
    return (
        f"({', '.join(map(str, axes))}) on {mesh._device_type} over ranks {ranks} "
        f"as {strides}{backends}{traits}"
    )


def group_by_name(mesh: DeviceMesh, name: str, asked: Any, dim: int) -> ProcessGroup:
    """The group of this name. While tracing, it comes from where a graph can find it.

    Raises:
        RuntimeError: a loaded mesh whose group doesn't exist in this process.
    """
    traced = (
        None if isinstance(asked, str) else device_mesh._maybe_traced_group(mesh, dim)
    )
    if traced is not None:
        return traced
    if name.startswith(UNBOUND):
        raise RuntimeError(
            "This mesh was loaded, and no process group here has the ranks "
            f"{name.removeprefix(UNBOUND)} of its axis. "
            "Build a mesh over these ranks first; the loaded one then finds its groups."
        )
    return device_mesh._get_pg_from_name(mesh._get_root_mesh(), name)


def abort_groups(mesh: DeviceMesh) -> None:
    """Abort every group that a root mesh and its views own, each once, and take them
    out of c10d's books.

    The default group stays, and so do groups that other universes use, too: they aren't
    this mesh's to end.
    """
    groups = _owned(mesh)
    try:
        failed = _aborted_together(groups)
    finally:
        for group in groups:
            distributed_c10d._cleanup_process_group_global_state(group)
        shared = shared_state(mesh)
        shared.registry.clear()
        shared.flattened.clear()  # whose groups are gone
        forget_views(shared)
        forget_shardings()  # their meshes hold the groups that are gone
        # What is made from now on is made anew, for a loaded mesh as well.
        shared.universe = shared.saved_number = None
    if failed:
        raise failed[0]


def _aborted_together(groups: Sequence[ProcessGroup]) -> list[BaseException]:
    """Abort all of them at the same time, each in a thread of its own; returns what
    failed.

    The abort of one communicator may wait for work that only the abort of another one
    ends. A group call of the caller (ncclGroupStart) doesn't help: it is of its thread,
    and ProcessGroupNCCL aborts in another one.
    """
    failed: list[BaseException] = []

    def abort(group: ProcessGroup) -> None:
        try:
            group.abort()
        except BaseException as error:
            failed.append(error)

    # no pool: it ends before exit handlers run
    threads = [Thread(target=abort, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def _owned(mesh: DeviceMesh) -> list[ProcessGroup]:
    shared = shared_state(mesh)
    names = dict.fromkeys((*(group_names(mesh) or ()), *shared.registry))
    if shared.universe is not None:
        names |= dict.fromkeys(
            entry.group_name for entry in shared.universe.table.entries.values()
        )
    found = [find_group(name) for name in names if name]
    default = (
        distributed_c10d._get_default_group()
        if distributed_c10d.is_initialized()
        else None
    )
    return [group for group in found if group is not None and group is not default]
