"""The groups of a mesh: one for each axis and, for redistributions, some over several axes together. Made when the mesh
is, or when its owner asks; found by name afterwards."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from torch.distributed import device_mesh, distributed_c10d

from ._group_table import Kind, find_group
from ._mesh_check import check_same_mesh
from ._mesh_group_names import group_names
from ._mesh_layout import _MeshLayout
from ._mesh_pickle import UNBOUND
from ._mesh_state import axis_names, is_apart, shared_state, view_of
from ._process_groups import Request, axis_group, makes_communicators
from ._rank_map import short
from ._settings import get_settings
from ._universe import (
    Joint,
    Universe,
    current_world,
    join_universe,
    making_private,
    private_groups,
    universe_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import ProcessGroup

    from ._mesh_input import Override


def make_own_groups(mesh: DeviceMesh, overrides: Sequence[Override]) -> None:
    """Give a new mesh the groups of its axes, and those that redistributions over several axes use.

    If it is a root and made inside a block of `private_groups`, its universe is private.
    """
    shared = shared_state(mesh)
    if making_private.get() and mesh._root_mesh is None:
        shared.private = current_world().next_private(shared.rank_map)
    mesh._dim_group_names = make_groups(mesh, view_of(mesh).layout, mesh._mesh_dim_names, overrides)
    make_joint_groups(mesh)


def finish_view(mesh: DeviceMesh) -> None:
    """Give a view with new axes, which have their groups, those that redistributions over several axes use."""
    mark_apart(mesh)
    make_joint_groups(mesh)


def mark_apart(mesh: DeviceMesh) -> None:
    """Note of a new view whether it was made in a block of `private_groups`; see `is_apart`."""
    if making_private.get() and shared_state(mesh).private is None:
        mesh.__dict__["_apart"] = True


def make_groups(
    mesh: DeviceMesh, layout: _MeshLayout, names: Sequence[str] | None, overrides: Sequence[Override]
) -> list[str]:
    """The name of this rank's group on each axis of ``layout``, made where there is none; [] on a rank outside. Axes
    that a view of `is_apart` gets share no group either."""
    if is_apart(mesh):
        with private_groups():
            return _find_or_make(mesh, layout, names, overrides)
    return _find_or_make(mesh, layout, names, overrides)


def _find_or_make(
    mesh: DeviceMesh, layout: _MeshLayout, names: Sequence[str] | None, overrides: Sequence[Override]
) -> list[str]:
    shared = shared_state(mesh)
    check_same_mesh(lambda: _describe(mesh, layout, names, overrides))
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
    """The groups over several axes of a new mesh that `options.flatten` asks for."""
    policy, large = get_settings().flatten, _large(mesh)
    if len(large) < 2 or is_apart(mesh):
        return
    if policy == "create":
        _make_joint(mesh, sets_of_axes(mesh))
    # With sharing off, views of one universe share nothing unasked, and they would share this one.
    elif policy == "whole" and get_settings().share_groups != "off" and not _costs_memory_at_once():
        _make_joint(mesh, [large])


def _costs_memory_at_once() -> bool:
    return makes_communicators(distributed_c10d._get_default_group())


def prepare(mesh: DeviceMesh) -> None:
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
    universe = universe_of(shared_state(mesh))
    for made in _make_joint(mesh, sets_of_axes(mesh)):
        universe.version += not made.asked_for
        made.asked_for = True


def _large(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(axis for axis, size in enumerate(view_of(mesh).layout.top_level_sizes) if size > 1)


def sets_of_axes(mesh: DeviceMesh) -> Iterable[tuple[int, ...]]:
    """Each set of two or more axes of a mesh, without those of one rank."""
    axes = _large(mesh)
    return itertools.chain.from_iterable(itertools.combinations(axes, count) for count in range(2, len(axes) + 1))


def _make_joint(mesh: DeviceMesh, subsets: Iterable[tuple[int, ...]]) -> list[Joint]:
    """The groups over these sets of axes, made where there is none."""
    universe, view = universe_of(shared_state(mesh)), view_of(mesh)
    names = axis_names(mesh._mesh_dim_names, len(view.layout.axes))
    overrides = [override_of(mesh, universe, axis) for axis in range(len(view.layout.axes))]
    found: list[Joint] = []
    for axes in subsets:
        kind = _common_kind([overrides[axis] for axis in axes])
        if kind is None:
            continue  # groups that can do different things can't be joined
        layout = view.layout.select(axes).collapse().ascending()
        made = universe.joint.get((layout, kind))
        if made is None:
            name, override = ",".join(names[axis] for axis in axes), overrides[axes[0]]
            request = Request(view.show(_MeshLayout((layout,))), name, override, mesh._device_type, joint=True)
            group = axis_group(universe, request)
            made = universe.joint[layout, kind] = Joint(group.group_name if group is not None else "")
            universe.version += 1
        found.append(made)
    return found


def override_of(mesh: DeviceMesh, universe: Universe | None, axis: int) -> Override:
    """The backend and options that an axis of a mesh has; of a group that wasn't made here, its backend."""
    held = group_names(mesh)
    if not held:
        return (None, None)  # this rank is outside
    known = universe.overrides.get(held[axis]) if universe is not None else None
    if known is not None:
        return known
    group = find_group(held[axis])
    if group is None or group is distributed_c10d._get_default_group():
        return (None, None)
    return (distributed_c10d.get_backend(group), None)


def _common_kind(overrides: Sequence[Override]) -> Kind | None:
    kinds = {Kind.of(override) for override in overrides}
    return kinds.pop() if len(kinds) == 1 else None


def joint_group_name(mesh: DeviceMesh, axes: Sequence[int]) -> str | None:
    """The name of the group over several axes of a mesh, in whatever order it holds their ranks; None if there is none.

    The same on all ranks, since it follows from the mesh calls of this universe and the options: a group that was made
    for redistributions, else a view that somebody flattened, on the backend and with the options that the axes have.
    """
    shared, view = shared_state(mesh), view_of(mesh)
    join_universe(shared)
    universe = shared.universe
    kind = _common_kind([override_of(mesh, universe, axis) for axis in axes])
    if kind is None:
        return None
    wanted = view.layout.select(axes).collapse().ascending()
    made = universe.joint.get((wanted, kind)) if universe is not None and not is_apart(mesh) else None
    existing = get_settings().flatten == "existing"
    usable = not existing
    usable = usable or (made is not None and made.asked_for)  # overlay only
    if made is not None and usable:
        return made.group_name
    # What we make a group for doesn't run in the default group, beside the user's own collectives.
    default = None if existing else distributed_c10d._get_default_group().group_name
    for _, flattened in sorted(shared.flattened.items(), key=lambda item: str(item[0])):
        if is_apart(flattened):
            continue
        names = group_names(flattened)
        if not names or names[0] == default or view_of(flattened).layout.axes[0].ascending() != wanted:
            continue
        if Kind.of(override_of(flattened, universe, 0)) == kind:
            return names[0]
    return None


def joint_groups_known(mesh: DeviceMesh) -> tuple[Any, ...]:
    """Part of every cache's key: it changes when `joint_group_name` may answer differently.

    A view that is flattened may make no group and still bring one within reach; under the same name an equal mesh may
    have another view, over other axes or with a group of its own.
    """
    shared = shared_state(mesh)
    join_universe(shared)
    universe = shared.universe
    made = (universe.serial, universe.version) if universe is not None else ()
    flattened = [(name, *(group_names(v) or ())) for name, v in list(shared.flattened.items())]
    return (*made, *flattened) if flattened else made


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
    traits = ", private" if shared_state(mesh).private else ""
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
