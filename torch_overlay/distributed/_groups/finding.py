"""The groups of a mesh: made with it, found by name afterwards."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from torch.distributed import device_mesh, distributed_c10d

from .._mesh.check import check_same_mesh
from .._mesh.pickling import UNBOUND
from .._mesh.rank_map import short
from .._mesh.state import axis_names, group_names, is_apart, shared_state, view_of
from .._mesh_layout import _MeshLayout
from .making import Request, axis_group
from .settings import get_settings, makes_communicators
from .table import Kind, find_group
from .universe import (
    Universe,
    current_world,
    join_universe,
    made_private,
    making_private,
    universe_of,
    warn_outside_of_blocks,
)
from .waits import leave_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import ProcessGroup

    from .._mesh.input import Override
    from .._mesh.state import SharedState
    from .._mesh_layout import _FlatLayout


def make_own_groups(mesh: DeviceMesh, overrides: Sequence[Override]) -> None:
    """Give a new mesh the groups of its axes, and those that redistributions over several axes use.

    If it is a root and made inside a block of `private_groups`, its universe is private.
    """
    shared = shared_state(mesh)
    if making_private.get() and mesh._root_mesh is None:
        shared.private = current_world().next_private(shared.rank_map)
    mesh._dim_group_names = make_groups(mesh, view_of(mesh).layout, mesh._mesh_dim_names, overrides)
    make_joint_groups(mesh)


def make_groups(
    mesh: DeviceMesh, layout: _MeshLayout, names: Sequence[str] | None, overrides: Sequence[Override]
) -> list[str]:
    """The name of this rank's group on each axis of ``layout``, made where there is none; [] on a rank outside. Axes
    that a view of `is_apart` gets share no group either."""
    if is_apart(mesh):
        with made_private():
            return _find_or_make(mesh, layout, names, overrides)
    return _find_or_make(mesh, layout, names, overrides)


def _find_or_make(
    mesh: DeviceMesh, layout: _MeshLayout, names: Sequence[str] | None, overrides: Sequence[Override]
) -> list[str]:
    leave_line(lambda: _describe(mesh, layout, names, overrides))
    check_same_mesh(lambda: _describe(mesh, layout, names, overrides))
    shared = shared_state(mesh)
    if shared.private is None:
        warn_outside_of_blocks()
    universe = universe_of(shared)
    found: list[str] = []
    for axis, name, override in zip(layout.axes, axis_names(names, len(layout.axes)), overrides, strict=True):
        view = view_of(mesh).show(_MeshLayout((axis,)))
        group = axis_group(universe, Request(view, name, override, mesh._device_type))
        if group is not None:
            shared.registry[group.group_name] = group
            found.append(group.group_name)
    return found


def make_joint_groups(mesh: DeviceMesh) -> None:
    """The group over all axes of a new mesh, if mesh_joint_groups asks for it; none of a view of `is_apart`."""
    large = _large(mesh)
    if len(large) > 1 and not is_apart(mesh) and _brings_joint():
        _make_joint(mesh, [large])


def _brings_joint() -> bool:
    """Whether a new mesh brings a group over all its axes. With sharing off it brings none: all views of a universe
    would share it."""
    if get_settings().mesh_joint_groups == "existing" or get_settings().mesh_share_groups == "off":
        return False
    # A communicator takes memory as soon as it is made, so it must be asked for.
    return not makes_communicators(distributed_c10d._get_default_group())


def prepare(mesh: DeviceMesh) -> None:  # overlay only
    """Make a group for each set of two or more axes of a mesh, which redistributions over them then use.

    Collective: all ranks of the mesh call it, and all ranks of the world where these make every group. A mesh of n axes
    of more than one rank has 2^n - n - 1 such sets. On NCCL a group takes memory from its first collective on.

    Raises:
        RuntimeError: the mesh has no groups, is a private view of a mesh that isn't private, or a member didn't take
            part within the timeout.

    >>> prepare(mesh["dp", "cp", "tp"])  # then P,P,S0 -> R,R,R takes two collectives  # doctest: +SKIP
    """
    if group_names(mesh) is None:
        raise RuntimeError(f"prepare needs a mesh with process groups, and {mesh} was made without")
    if is_apart(mesh):
        raise RuntimeError(
            f"prepare makes groups that all views of a mesh share, and {mesh} was made inside private_groups() from a "
            "mesh that isn't private. Make the root mesh inside, and prepare that."
        )
    leave_line(lambda: f"prepare({mesh})")
    _make_joint(mesh, sets_of_axes(mesh))
    universe = universe_of(shared_state(mesh))
    made = {key for axes in sets_of_axes(mesh) if (key := _joint_key(mesh, universe, axes))}
    universe.version += len(made - universe.asked_for)
    universe.asked_for |= made


def _large(mesh: DeviceMesh) -> tuple[int, ...]:
    """The axes of more than one rank."""
    return tuple(axis for axis, size in enumerate(view_of(mesh).layout.top_level_sizes) if size > 1)


def sets_of_axes(mesh: DeviceMesh) -> Iterable[tuple[int, ...]]:
    """Each set of two or more axes of a mesh, without those of one rank."""
    axes = _large(mesh)
    return itertools.chain.from_iterable(itertools.combinations(axes, count) for count in range(2, len(axes) + 1))


def _make_joint(mesh: DeviceMesh, subsets: Iterable[tuple[int, ...]]) -> None:
    """Make the group over each of these sets of axes that isn't there. Collective, as `axis_group` is."""
    universe, view = universe_of(shared_state(mesh)), view_of(mesh)
    names = axis_names(mesh._mesh_dim_names, len(view.layout.axes))
    for axes in subsets:
        key = _joint_key(mesh, universe, axes)
        if key is None or key in universe.joint:
            continue
        name, override = ",".join(names[axis] for axis in axes), override_of(mesh, universe, axes[0])
        axis = view.show(_MeshLayout((key[0],)))
        group = axis_group(universe, Request(axis, name, override, mesh._device_type, joint=True))
        universe.joint[key] = group.group_name if group is not None else ""
        universe.version += 1


def override_of(mesh: DeviceMesh, universe: Universe | None, axis: int) -> Override:
    """The backend and options that an axis of a mesh has; of a group that wasn't made here, its backend."""
    held = group_names(mesh)
    known = universe.overrides if universe is not None else {}
    # A rank outside must ask for the same groups as the members, since all ranks may have to make them together.
    if not held:
        axes = view_of(mesh).layout.axes
        return known.get((axis_names(mesh._mesh_dim_names, len(axes))[axis], axes[axis]), (None, None))
    if held[axis] in known:
        return known[held[axis]]
    group = find_group(held[axis])
    if group is None or group is distributed_c10d._get_default_group():
        return (None, None)
    return (distributed_c10d.get_backend(group), None)


def _joint_key(mesh: DeviceMesh, universe: Universe | None, axes: Sequence[int]) -> tuple[_FlatLayout, Kind] | None:
    """What a group over several axes of a mesh is known by: the indices that it holds, in ascending order, and what it
    can do. None for axes whose groups can do different things, which can't be joined."""
    kinds = {Kind.of(override_of(mesh, universe, axis)) for axis in axes}
    return (view_of(mesh).layout.select(axes).collapse().ascending(), kinds.pop()) if len(kinds) == 1 else None


def joint_group_name(mesh: DeviceMesh, axes: Sequence[int]) -> str | None:
    """The name of the group over several axes of a mesh, in whatever order it holds their ranks; None if there is none,
    and for a view of `is_apart`.

    All ranks of the mesh find the same group, or none, since it follows from the mesh calls of this universe and the
    options: a group that was made for redistributions, else that of a view that somebody flattened, on the backend and
    with the options that the axes have. On a rank outside it is "" for a group that was made, else None.
    """
    shared = shared_state(mesh)
    join_universe(shared)
    universe = shared.universe
    key = None if is_apart(mesh) else _joint_key(mesh, universe, axes)
    if key is None:
        return None
    usable = get_settings().mesh_joint_groups != "existing"
    usable = usable or (universe is not None and key in universe.asked_for)  # overlay only
    if usable and universe is not None and key in universe.joint:
        return universe.joint[key]
    return _flattened_group(shared, key)


def _flattened_group(shared: SharedState, key: tuple[_FlatLayout, Kind]) -> str | None:
    """The name of the group of a flattened view, that of the first name in order."""
    # What we make a group for doesn't run in the default group, beside the user's own collectives.
    existing = get_settings().mesh_joint_groups == "existing"
    default = None if existing else distributed_c10d._get_default_group().group_name
    for _, flattened in sorted(shared.flattened.items(), key=lambda item: str(item[0])):
        names = group_names(flattened)
        if not names or names[0].startswith(UNBOUND) or names[0] == default or is_apart(flattened):
            continue
        if _joint_key(flattened, shared.universe, (0,)) == key:
            return names[0]
    return None


def joint_groups_known(mesh: DeviceMesh) -> tuple[Any, ...]:
    """Part of every cache's key, beside the options: it changes when `joint_group_name` may answer differently.

    A new flattened view changes it even if no group was made, since the group that it has may serve from now on. Under
    the same name an equal mesh may have another view, over other axes or with a group of its own. A view of `is_apart`
    has no such group, and a slice of it may equal one of the root mesh otherwise.
    """
    if is_apart(mesh):
        return ("apart",)
    shared = shared_state(mesh)
    join_universe(shared)
    universe = shared.universe
    made = (universe.serial, universe.version) if universe is not None else ()
    flattened = [(name, *(group_names(v) or ())) for name, v in list(shared.flattened.items())]
    return (*made, *flattened)


def _describe(mesh: DeviceMesh, layout: _MeshLayout, names: Sequence[str] | None, overrides: Sequence[Override]) -> str:
    """One line about axes that are about to get groups, for ranks to compare; of options, that there are some."""
    rank_map = view_of(mesh).rank_map
    axes = (
        [f"{name}={size}" for name, size in zip(names, layout.top_level_sizes, strict=True)]
        if names
        else layout.top_level_sizes
    )
    ranks = f"0 to {rank_map.numel - 1}"
    if not rank_map.is_identity:
        ranks = f"{short(rank_map.ranks())} #{rank_map.key[1][:8]}"
    asked = [f"{backend or ''}{'+options' if options else ''}" for backend, options in overrides]
    backends = f", backends {asked}" if any(asked) else ""
    strides = ", ".join(str(axis) for axis in layout.axes)
    traits = ", private" if shared_state(mesh).private or making_private.get() else ""
    traits += ", preserve_rank_order" if mesh._preserve_rank_order else ""
    return f"({', '.join(map(str, axes))}) on {mesh._device_type} over ranks {ranks} as {strides}{backends}{traits}"


def group_by_name(mesh: DeviceMesh, name: str, asked: Any, dim: int) -> ProcessGroup:
    """The group of this name. While tracing, it comes from where a graph can find it.

    Raises:
        RuntimeError: a loaded mesh whose group doesn't exist in this process.
    """
    traced = None if isinstance(asked, str) else device_mesh._maybe_traced_group(mesh, dim)
    if traced is not None:
        return traced
    if name.startswith(UNBOUND):
        raise RuntimeError(
            f"This mesh was loaded, and no process group here has the ranks {name.removeprefix(UNBOUND)} of its axis. "
            "Build a mesh over these ranks first; the loaded one then finds its groups."
        )
    return device_mesh._get_pg_from_name(mesh._get_root_mesh(), name)
