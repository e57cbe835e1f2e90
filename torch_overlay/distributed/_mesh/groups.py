"""The process groups of a mesh: how they are found, created, shared and aborted.

Start at `make_own_groups`, which a new mesh calls. For each axis it calls `axis_group`,
which decides whether the axis gets the default group, a group that its universe has
already, or a new one. Then come joint groups, which a redistribution over several axes
uses; the creation of a group, by backend; and `abort_groups`.

Nearly everything here is collective. Every decision therefore depends only on what all
members know: the mesh calls of the universe before this one, and the settings.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
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
from .compare import OPTION, WITHOUT, check_same_mesh, explained, leave_line
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
    """Counts of group requests in this process.

    Attributes:
        made: groups that were created for a mesh and hold this rank.
        shared: requests that got an existing group.
        calls: calls of new_group and split_group.
    """

    made: int = 0
    shared: int = 0
    calls: int = 0


_counted = GroupCounters()  # overlay only


def counters() -> dict[str, int]:  # overlay only
    """The counts of this process, by their description."""
    return {
        "process groups made for meshes": _counted.made,
        "requests served by a shared group": _counted.shared,
        "calls of torch's group constructors": _counted.calls,
    }


@dataclass(frozen=True)
class Request:
    """A request for the group of one axis.

    Attributes:
        view: the view of this one axis.
        name: the name of the axis.
        override: the backend and the options that the user gave for it.
        device_type: the device type of the mesh.
        joint: True if the group is for redistributions over several axes, False if it
            is for an axis that the user made.
    """

    view: View
    name: str
    override: Override
    device_type: str
    joint: bool = False


# --- Entry points: a new mesh, or new axes of an existing one ---


def make_own_groups(mesh: DeviceMesh, overrides: Sequence[Override]) -> None:
    """Make and store the groups of a new mesh. Collective, as `axis_group` is. A root
    mesh that is built inside `private_groups` makes its universe private."""
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
    """The name of this rank's group on each axis, [] on a rank outside; makes what is
    missing. Collective, as `axis_group` is. Axes that a view of `is_apart` gets by
    unflatten or flatten don't share groups either."""
    if is_apart(mesh):
        with made_private():
            return _find_or_make_groups(mesh, layout, names, overrides)
    return _find_or_make_groups(mesh, layout, names, overrides)


def _find_or_make_groups(
    mesh: DeviceMesh,
    layout: _MeshLayout,
    names: Sequence[str] | None,
    overrides: Sequence[Override],
) -> list[str]:
    """`make_groups`, with the privacy that the context says."""
    # Both come before any group is made: a rank whose peers build another mesh would
    # hang in the first creation.
    leave_line(
        lambda: _describe(mesh, layout, names, overrides), view_of(mesh).rank_map
    )
    check_same_mesh()
    shared = shared_state(mesh)
    if shared.private is None:
        warn_outside_of_blocks()
    universe = universe_of(shared)
    own_groups: list[str] = []
    for axis, name, override in zip(
        layout.axes, axis_names(names, len(layout.axes)), overrides, strict=True
    ):
        view = view_of(mesh).with_layout(_MeshLayout((axis,)))
        group = axis_group(universe, Request(view, name, override, mesh._device_type))
        if group is not None:
            shared.registry[group.group_name] = group
            own_groups.append(group.group_name)
    return own_groups


def _describe(
    mesh: DeviceMesh,
    layout: _MeshLayout,
    names: Sequence[str] | None,
    overrides: Sequence[Override],
) -> str:
    """One line about axes that get groups, for ranks to compare, without options."""
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
        # The text shortens long lists of ranks, so a digest tells them apart.
        ranks = f"{ranks_text(rank_map.ranks())} #{rank_map.key[1][:8]}"
    override_texts = [
        f"{backend or ''}{'+options' if options else ''}"
        for backend, options in overrides
    ]
    backends = f", backends {override_texts}" if any(override_texts) else ""
    strides = ", ".join(str(axis) for axis in layout.axes)
    traits = ", private" if shared_state(mesh).private or making_private.get() else ""
    traits += ", preserve_rank_order" if mesh._preserve_rank_order else ""
    return (
        f"({', '.join(map(str, axes))}) on {mesh._device_type} over ranks {ranks} "
        f"as {strides}{backends}{traits}"
    )


# --- One axis: the default group, an existing group, or a new one ---


def axis_group(universe: Universe, request: Request) -> ProcessGroup | None:
    """This rank's group along one axis: the default group, one of the universe, or a
    new one. None on a rank outside the mesh.

    Collective: the members call it, where the backend lets members create a group
    alone; else every rank of the world does.
    """
    world = distributed_c10d._get_default_group()
    if _default_serves(world, universe, request):
        _counted.shared += 1  # overlay only
        universe.by_default.setdefault(request.name)  # overlay only
        return world
    alone = members_create(world, request.override[0])
    table = universe.table
    keys = _group_keys(request, _ranks_to_ask_for(request.view, alone))
    if _is_never_shared(universe, request):
        keys = [table.unused_key(key) for key in keys]
    # Members destroy a group together, so they can also create it again. Where the
    # whole world creates groups, ranks outside don't know that it is gone, and
    # get_or_make raises.
    if alone:
        for key in keys:
            table.forget_gone(key)
    calls = _counted.calls  # overlay only
    entries = table.get_or_make(
        keys, lambda missing: new_groups(request, missing, alone)
    )
    # Without `alone` there is one entry for each copy, and only one of them holds this
    # rank.
    own_entry = next((entry for entry in entries if entry.group_name), None)
    _record_override(universe, request, own_entry)
    if own_entry is None:
        return None
    _counted.made += _counted.calls > calls  # overlay only
    _counted.shared += _counted.calls == calls  # overlay only
    _reserve_for_view(own_entry, universe)
    return _add_axis_name(own_entry, request)


def _default_serves(world: ProcessGroup, universe: Universe, request: Request) -> bool:
    """True if the axis gets the default group, as one over the whole world does unless
    it is private or joint. Other device types than CPU don't get a gloo default group;
    the type decides, not the devices of this host, since hosts may differ."""
    # A joint group isn't the default group: it would run in one stream with the user's
    # own collectives. A private mesh shares no group, not even this one.
    if (
        request.joint
        or universe.private
        or making_private.get()
        or not _covers_world(request, world.size())
    ):
        return False
    return request.device_type == "cpu" or distributed_c10d.get_backend(world) != "gloo"


def _covers_world(request: Request, world_size: int) -> bool:
    view = request.view
    if view.layout.numel() != world_size or request.override != (None, None):
        return False
    if view.layout.axes[0] == _FlatLayout((world_size,)) and view.rank_map.is_identity:
        return True  # the usual case, without a list as long as the world
    return view.ranks(view.rank_map[0]) == list(range(world_size))


def _ranks_to_ask_for(view: View, alone: bool) -> list[list[int]]:
    """The ranks of each group that this rank asks for. On a 2 x 4 mesh, rank 5 asks
    along the inner axis for [[4, 5, 6, 7]] if members create ``alone``, else also for
    [0, 1, 2, 3]."""
    rank = distributed_c10d.get_rank()
    if not alone:
        return [view.ranks(view.rank_map[start]) for start in view.copies()]
    return [view.ranks(rank)] if view.coordinate(rank) is not None else []


def _group_keys(request: Request, copies: Sequence[Sequence[int]]) -> list[Key]:
    """The key of each copy of the axis, with its name if only equal names share."""
    policy = get_settings().mesh_share_groups
    # Groups of one rank are always kept apart by name. They cost nothing, and a loop
    # that destroys the group of each axis of a (1, 1) mesh would destroy a shared one
    # twice.
    named = policy in ("names", "off") or request.view.layout.numel() == 1
    name = request.name if named and not request.joint else None
    kind = Kind.of(request.override)
    return [Key(compact(ranks), kind, name) for ranks in copies]


def _is_never_shared(universe: Universe, request: Request) -> bool:
    """True if no other axis ever gets this group: sharing is "off", or the axis is made
    inside `private_groups` from a mesh that isn't private."""
    if request.joint:
        return False
    return get_settings().mesh_share_groups == "off" or (
        making_private.get() and not universe.private
    )


def _record_override(universe: Universe, request: Request, entry: Entry | None) -> None:
    """Record the backend and options of an axis: a joint group needs equal ones."""
    # A rank outside has no group, but must decide on joint groups as the members do.
    axis = request.name, request.view.layout.axes[0]
    universe.overrides[entry.group_name if entry else axis] = request.override


def _reserve_for_view(entry: Entry, universe: Universe) -> None:
    """Mark a group that a single view has. `mark_apart` fills in the view's token."""
    if making_private.get() and not universe.private:
        entry.apart = ""


def _add_axis_name(entry: Entry, request: Request) -> ProcessGroup | None:
    """Record that the axis uses the group, also in c10d's description of the group. A
    joint request adds its name, but doesn't set `serves_axis`."""
    group = entry.group
    # A group that serves no axis has no owner who would destroy it, so
    # `_destroy_abandoned_groups` does.
    entry.serves_axis |= not request.joint
    if group is not None and request.name not in entry.names:
        entry.names.append(request.name)
        if len(entry.names) > 1:
            group._set_group_desc(description(entry.names))
    return group


def description(names: Sequence[str]) -> str:
    """The description of a group in c10d's logs; a joint group as if it were flattened.

    >>> description(["tp"]), description(["dp,tp"]), description(["dp_cp", "fsdp"])
    ('mesh_tp', 'mesh_dp_tp', 'mesh_dp_cp,fsdp')
    """
    return "mesh_" + ",".join(dict.fromkeys([name.replace(",", "_") for name in names]))


def group_by_name(mesh: DeviceMesh, name: str, mesh_dim: Any, dim: int) -> ProcessGroup:
    """The group of this name; while a graph is traced, its value in the graph."""
    traced = (
        None
        if isinstance(mesh_dim, str)
        else device_mesh._maybe_traced_group(mesh, dim)
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


# --- Joint groups, for redistributions over several axes at once ---


def make_joint_groups(mesh: DeviceMesh) -> None:
    """Make the group over all axes of a mesh if ``mesh_joint_groups`` asks for it, not
    for a view of `is_apart`. Collective, as `axis_group`."""
    axes = _axes_of_several_ranks(mesh)
    if len(axes) > 1 and not is_apart(mesh) and _new_meshes_get_joint_groups():
        _make_missing_joint_groups(mesh, [axes])


def _new_meshes_get_joint_groups() -> bool:
    # Without sharing, no group may serve two views, but all views of a universe use its
    # joint groups.
    if (
        get_settings().mesh_joint_groups == "existing"
        or get_settings().mesh_share_groups == "off"
    ):
        return False
    # On a device-bound world a group takes memory as soon as it is made, so the user
    # has to ask for it.
    return not makes_communicators(distributed_c10d._get_default_group())


def prepare(mesh: DeviceMesh) -> None:  # overlay only
    """Make a group for each set of two or more axes of a mesh. Redistributions over
    these axes then use it.

    Collective: all ranks of the mesh call it, or all ranks of the world where the
    backend doesn't let members create a group alone. A mesh with n axes of more than
    one rank has 2^n - n - 1 such sets. On NCCL a group takes memory from its first
    collective on.

    After this call P,P,S0 -> R,R,R takes two collectives:

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
    leave_line(lambda: f"prepare({mesh})", view_of(mesh).rank_map)
    _make_missing_joint_groups(mesh, sets_of_axes(mesh))
    universe = universe_of(shared_state(mesh))
    joint_keys = {
        key for axes in sets_of_axes(mesh) if (key := _joint_key(mesh, universe, axes))
    }
    # Plans are cached by this version. Preparing the same mesh again keeps them.
    universe.version += len(joint_keys - universe.asked_for)
    universe.asked_for |= joint_keys


def _axes_of_several_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(
        axis
        for axis, size in enumerate(view_of(mesh).layout.top_level_sizes)
        if size > 1
    )


def sets_of_axes(mesh: DeviceMesh) -> Iterable[tuple[int, ...]]:
    """Each set of two or more axes, as numbers. Axes of one rank are left out."""
    axes = _axes_of_several_ranks(mesh)
    return itertools.chain.from_iterable(
        itertools.combinations(axes, count) for count in range(2, len(axes) + 1)
    )


def _make_missing_joint_groups(
    mesh: DeviceMesh, subsets: Iterable[tuple[int, ...]]
) -> None:
    """Make the missing groups of these sets of axes, not for axes with different
    backends or options. Collective, as `axis_group`."""
    universe, view = universe_of(shared_state(mesh)), view_of(mesh)
    names = axis_names(mesh._mesh_dim_names, len(view.layout.axes))
    for axes in subsets:
        key = _joint_key(mesh, universe, axes)
        if key is None or key in universe.joint:
            continue
        name = ",".join(names[axis] for axis in axes)
        override = override_of(mesh, universe, axes[0])
        flat_view = view.with_layout(_MeshLayout((key[0],)))
        group = axis_group(
            universe, Request(flat_view, name, override, mesh._device_type, joint=True)
        )
        # Ranks outside record it, too, under an empty name: they plan as the members
        # do.
        universe.joint[key] = group.group_name if group is not None else ""
        universe.version += 1


def override_of(mesh: DeviceMesh, universe: Universe | None, axis: int) -> Override:
    """The backend and options of an axis; the backend alone if its group wasn't made
    here. (None, None) for the default group, a destroyed one, and on a rank outside for
    an axis that asked for nothing."""
    own_groups = group_names(mesh)
    overrides = universe.overrides if universe is not None else {}
    # A rank outside must ask for the same groups as the members, since all ranks may
    # have to make them together.
    if not own_groups:
        axes = view_of(mesh).layout.axes
        return overrides.get(
            (axis_names(mesh._mesh_dim_names, len(axes))[axis], axes[axis]),
            (None, None),
        )
    if own_groups[axis] in overrides:
        return overrides[own_groups[axis]]
    group = find_group(own_groups[axis])
    if group is None or group is distributed_c10d._get_default_group():
        return (None, None)
    return (distributed_c10d.get_backend(group), None)


def _joint_key(
    mesh: DeviceMesh, universe: Universe | None, axes: Sequence[int]
) -> tuple[_FlatLayout, Kind] | None:
    """The key of a joint group: indices in ascending order, backend and options. None
    if the groups of the axes are of different kinds."""
    kinds = {Kind.of(override_of(mesh, universe, axis)) for axis in axes}
    return (
        (view_of(mesh).layout.select(axes).collapse().ascending(), kinds.pop())
        if len(kinds) == 1
        else None
    )


def joint_group_name(mesh: DeviceMesh, axes: Sequence[int]) -> str | None:
    """The name of the group over several axes, which may hold their ranks in any order:
    one made for redistributions, else that of a flattened view of their kind. "" on a
    rank outside; None if there is none, and for a view of `is_apart`.

    All ranks of the mesh get the same group or None: the answer follows from the mesh
    calls of this universe and the settings.
    """
    shared = shared_state(mesh)
    join_universe(shared)
    universe = shared.universe
    key = None if is_apart(mesh) else _joint_key(mesh, universe, axes)
    if key is None:
        return None
    usable = get_settings().mesh_joint_groups != "existing"
    was_prepared = universe is not None and key in universe.asked_for  # overlay only
    usable = usable or was_prepared  # overlay only
    if usable and universe is not None and key in universe.joint:
        return universe.joint[key]
    return _flattened_group(shared, key)


def _flattened_group(shared: SharedState, key: tuple[_FlatLayout, Kind]) -> str | None:
    """The name of the group of a flattened view over the indices of ``key``; of
    several, the first by name. None for views without a group, with a private one
    (``is_apart``) or the default group, unless ``mesh_joint_groups`` is "existing"."""
    # With "existing", the default group may serve axes that the user flattened into it.
    # With any other setting we make a group, so that these collectives don't queue
    # behind the user's own in the default group.
    existing = get_settings().mesh_joint_groups == "existing"
    default_name = (
        None if existing else distributed_c10d._get_default_group().group_name
    )
    # Sorted, so that all ranks pick the same view. Names may be members of an Enum,
    # which don't compare.
    for _, flattened in sorted(shared.flattened.items(), key=lambda item: str(item[0])):
        names = group_names(flattened)
        if (
            not names
            or names[0].startswith(UNBOUND)
            or names[0] == default_name
            or is_apart(flattened)
        ):
            continue
        if _joint_key(flattened, shared.universe, (0,)) == key:
            return names[0]
    return None


def joint_groups_known(mesh: DeviceMesh) -> tuple[Any, ...]:
    """A value that changes whenever `joint_group_name` may answer differently: part of
    the key of every cache of redistributions, beside the settings.

    Flattening changes it even if no group is made. It has the names of the groups,
    since an equal mesh may have another view under the same name, and a slice of a view
    of `is_apart`, which has no joint group, may equal a slice of the root mesh.
    """
    if is_apart(mesh):
        return ("apart",)
    shared = shared_state(mesh)
    join_universe(shared)
    universe = shared.universe
    joint_version = (universe.serial, universe.version) if universe is not None else ()
    flattened = [
        (name, *(group_names(view) or ()))
        for name, view in list(shared.flattened.items())
    ]
    return (*joint_version, *flattened)


# --- Creation, by backend ---


def new_groups(
    request: Request, copies: list[list[int]], alone: bool
) -> list[ProcessGroup | None]:
    """Create a group for each copy of an axis; None for a copy without this rank.
    Collective: if members create it ``alone``, they call this with their own ranks
    only, else every rank of the world does."""
    with explained(lambda: _describe_wait(request, copies, alone)) as found:
        try:
            groups = _create_groups(request, copies, alone)
        except RuntimeError as error:
            if found and len(error.args) == 1:
                error.args = (f"{error} While it waited: {found[0]}",)
            raise
    for ranks, group in zip(copies, groups, strict=True):
        if group is not None and logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "made %s, the process group %r of %s",
                group.group_desc,
                group.group_name,
                of_ranks(ranks),
            )
    return groups


def _describe_wait(
    request: Request, copies: list[list[int]], alone: bool
) -> tuple[str, list[int]]:
    """What this rank waits for, after "to", and who takes part, its own group first."""
    own_ranks = next(
        (ranks for ranks in copies if distributed_c10d.get_rank() in ranks), copies[0]
    )
    all_ranks = (
        request.view.rank_map.ranks()
        if alone
        else range(distributed_c10d.get_world_size())
    )
    return (
        f"make the process group of {axes_text([request.name])} over "
        f"{of_ranks(own_ranks)}",
        [*own_ranks, *all_ranks],
    )


def _create_groups(
    request: Request, copies: list[list[int]], alone: bool
) -> list[ProcessGroup | None]:
    """Create the groups by one split of the default group, or one by one."""
    # One call makes the groups of all copies.
    if not alone and _can_split(distributed_c10d._get_default_group(), request, copies):
        group = _split(request, copies)
        return [
            group if distributed_c10d.get_rank() in ranks else None for ranks in copies
        ]
    return [_new_group(request, ranks, alone) for ranks in copies]


def _can_split(world: ProcessGroup, request: Request, copies: list[list[int]]) -> bool:
    """True if one split of the default group makes all groups. In a world that isn't
    bound, the mesh's device type decides: the devices of hosts may differ."""
    device = world.bound_device_id or torch.device(request.device_type)
    backend = request.override[0]
    if not makes_communicators(world) or (
        world.bound_device_id is None and device.type == "cpu"
    ):
        return False
    parent = world._get_backend(device)
    if backend is not None and parent.name() != backend:
        return False
    splits = config.use_torchcomms or parent.supports_splitting
    # A split may sort its ranks, which would reorder the ranks of a mesh such as [[1,
    # 0]].
    return splits and all(ranks == sorted(ranks) for ranks in copies)


def _split(request: Request, copies: list[list[int]]) -> ProcessGroup | None:
    """Split the default group; returns this rank's. Every rank of the world calls
    it."""
    _counted.calls += 1  # overlay only
    group = distributed_c10d.split_group(
        parent_pg=distributed_c10d._get_default_group(),
        timeout=_timeout(request),
        pg_options=_own(request.override[1]),
        split_ranks=copies,
        group_desc=description([request.name]),
    )
    return None if group is None or group == GroupMember.NON_GROUP_MEMBER else group


def _new_group(request: Request, ranks: list[int], alone: bool) -> ProcessGroup | None:
    """Create one group by `new_group`. None on a rank outside."""
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
            # The order of ranks in a group is that of the mesh. torchcomms can't keep
            # an order, so sorted ranks, which need none, don't ask for it.
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
            f"see whether they died or build another mesh{WITHOUT}; {OPTION} compares "
            "meshes first."
        ) from error
    return (
        None
        if group == GroupMember.NON_GROUP_MEMBER
        else cast("ProcessGroup | None", group)
    )


def _own(options: Any) -> Any:
    """A copy of the user's options, where they can be copied: c10d writes into them,
    and one object may be given for several axes."""
    for copy_function in (copy.copy, copy.deepcopy):  # NCCL's have deepcopy only
        try:
            return copy_function(options)
        except Exception:  # whatever a backend's options raise
            continue
    return options


def _timeout(request: Request) -> timedelta | None:
    """The user's timeout for the axis, or the default group's; None for the backend's
    own."""
    options = request.override[1]
    return (
        options._timeout
        if options is not None
        else _timeout_of(distributed_c10d._get_default_group())
    )


# --- Abort ---


ABORT_LIMIT = 60.0  # seconds for all groups of a mesh together


def abort_groups(mesh: DeviceMesh) -> None:
    """Abort every group that a root mesh and its views own, and remove them from c10d's
    state. The mesh forgets its flattened views and its universe. The default group and
    those of other universes stay."""
    groups = _groups_of_universe(mesh)
    try:
        errors = _abort_together(groups)
    finally:
        for group in groups:
            distributed_c10d._cleanup_process_group_global_state(group)
        shared = shared_state(mesh)
        shared.registry.clear()
        shared.flattened.clear()  # a view without its group would be found again
        forget_views(shared)
        forget_shardings()  # cached results lie on meshes whose groups are gone
        # The next request opens a new universe, also for a loaded mesh, which would
        # otherwise join the old one by its saved number.
        shared.universe = shared.saved_number = None
    if errors:
        raise errors[0]


def _abort_together(groups: Sequence[ProcessGroup]) -> list[BaseException]:
    """Abort all groups at the same time, each in a thread of its own, and return the
    errors. Threads that take longer than `ABORT_LIMIT` seconds go on, with an error.
    """
    # One after the other can hang: the abort of one communicator may wait for work that
    # only the abort of another one ends. ncclGroupStart in this thread doesn't help,
    # since it holds for its own thread and ProcessGroupNCCL aborts in another one.
    errors: list[BaseException] = []

    def abort(group: ProcessGroup) -> None:
        try:
            group.abort()
        except BaseException as error:
            errors.append(error)

    # Not a ThreadPoolExecutor: it takes no work once the interpreter ends, and exit
    # handlers may call this.
    # Daemons: one whose abort never ends must not keep the process alive.
    threads = [Thread(target=abort, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    until = time.monotonic() + ABORT_LIMIT
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))
    hung = [
        group.group_name for group, thread in zip(groups, threads) if thread.is_alive()
    ]
    if hung:
        errors.append(
            RuntimeError(
                f"The abort of the process groups {', '.join(hung)} didn't end within "
                f"{ABORT_LIMIT:g} s. They are given up; end this process soon."
            )
        )
    return errors


def _groups_of_universe(mesh: DeviceMesh) -> list[ProcessGroup]:
    """The living groups of a root mesh, its views and joint ones, not the default
    group."""
    shared = shared_state(mesh)
    names = dict.fromkeys((*(group_names(mesh) or ()), *shared.registry))
    if shared.universe is not None:
        names |= dict.fromkeys(
            entry.group_name for entry in shared.universe.table.entries.values()
        )
    groups = [find_group(name) for name in names if name]
    default = (
        distributed_c10d._get_default_group()
        if distributed_c10d.is_initialized()
        else None
    )
    return [group for group in groups if group is not None and group is not default]
