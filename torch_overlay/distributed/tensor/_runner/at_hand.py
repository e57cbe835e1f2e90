"""Groups at hand: over which sets of mesh dims a plan may communicate, and by which
process groups.

All ranks must get the same sets, or they would run different plans. So the sets follow
from the calls that made meshes and groups, which all ranks make alike, and from the
options. It doesn't matter which groups other meshes have, or whether a group is still
alive.

The ranks of a process group may be in another order than the mesh has them. `Group`
tells where each member of the mesh dims sits in the group.

A cache key holds a `Site` in place of the mesh, so that the mesh can be freed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, get_process_group_ranks

from ..._mesh.groups import joint_group_name, joint_groups_known, sets_of_axes
from ..._mesh.pickling import UNBOUND
from ..._mesh.state import axis_names, group_names, shared_state, view_of
from ..._mesh.text import of_ranks
from ..._mesh.universe import Settings, find_group, get_settings
from .._planner.regions import NotPlanned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from ..._mesh.rank_map import View


class Site(NamedTuple):
    """Where a redistribution happens: a mesh as this rank sees it, as a value.

    Attributes:
        view: the mesh's layout over the ranks of its root mesh.
        names: the names of the axes, or None.
        coordinate: the coordinate of this rank.
        groups: for each axis the name of this rank's process group.
        joint: which process groups over several axes exist, see `joint_groups_known`.
        settings: the options in force.
        device: the device type of the mesh.
    """

    view: View
    names: tuple[str, ...] | None
    coordinate: tuple[int, ...]
    groups: tuple[str, ...]
    joint: tuple[Any, ...]
    settings: Settings
    device: str

    @staticmethod
    def of(mesh: DeviceMesh) -> Site:
        """Make the site of a mesh that has process groups and contains this rank."""
        return Site(
            view_of(mesh),
            mesh._mesh_dim_names,
            tuple(mesh._coordinate_on_dim or ()),
            tuple(group_names(mesh) or ()),
            joint_groups_known(mesh),
            get_settings(),
            mesh.device_type,
        )


REMEMBERED = 1024  # sites that the views of one root mesh remember at most


class Group(NamedTuple):
    """A process group as one step of a plan uses it.

    Attributes:
        name: the name by which functional collectives find the group.
        places: for each member, row-major over the axes of the step, its rank in the
            group.
        in_order: True if `places` is 0, 1, 2 and so on.
    """

    name: str
    places: tuple[int, ...]
    in_order: bool


class AtHand(NamedTuple):
    """The process groups of a mesh that plans may use.

    Attributes:
        joint: the sets of two or more axes that have a process group.
        known: True if the backends of all groups are built in, so that they have every
            collective that a plan may use.
        found: the groups that were looked up, by their axes.
    """

    joint: frozenset[tuple[int, ...]]
    known: bool
    found: dict[tuple[int, ...], Group]

    def find(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> Group:
        """Return this rank's process group over some axes, and remember it."""
        group = self.found.get(axes)
        if group is None:
            group = self.found[axes] = _look_up(mesh, axes)
        # destroy_process_group on a view of the mesh leaves the name in our table.
        elif find_group(group.name) is None:
            raise RuntimeError(gone(mesh, axes))
        return group


def joint_axes(mesh: DeviceMesh) -> frozenset[tuple[int, ...]]:
    """Return the sets of two or more axes, none of size 1, that have a group. The mesh
    must have process groups, and contain this rank."""
    return at_hand(mesh, Site.of(mesh)).joint


def at_hand(mesh: DeviceMesh, site: Site) -> AtHand:
    """Return the groups at hand for a site. `REMEMBERED` sites are kept, then none."""
    known = shared_state(mesh).remembered.at_hand
    groups = known.get(site)
    if groups is None:
        if len(known) >= REMEMBERED:
            known.clear()
        joint = frozenset(
            [
                axes
                for axes in sets_of_axes(mesh)
                if joint_group_name(mesh, axes) is not None
            ]
        )
        groups = known[site] = AtHand(joint, has_known_backends(mesh), {})
    return groups


def has_known_backends(mesh: DeviceMesh) -> bool:
    """True if the backends of a mesh's living groups are built in: another may lack
    collectives that only plans use. All ranks get the same result."""
    groups = [find_group(name) for name in group_names(mesh) or ()]
    return all(
        _backend_class(group, mesh.device_type).__module__.startswith("torch.")
        for group in groups
        if group
    )


def _backend_class(group: ProcessGroup, device_type: str) -> type:
    """The class of a group's backend, or of the group, if a subclass or without one."""
    if type(group) is ProcessGroup:
        # Without a backend for this device type every collective raises by itself.
        with contextlib.suppress(RuntimeError):
            return type(group._get_backend(torch.device(device_type)))
    return type(group)


def _look_up(mesh: DeviceMesh, axes: Sequence[int]) -> Group:
    """Find this rank's process group over some axes, and how it orders its ranks."""
    members = members_along(mesh, axes)
    name = (
        _axis_group_name(mesh, axes[0])
        if len(axes) == 1
        else joint_group_name(mesh, axes)
    )
    if name is None:
        raise NotPlanned(f"no group over axes {axes} of {mesh}")
    group = find_group(name)
    if group is None:
        raise RuntimeError(gone(mesh, axes))
    ranks = get_process_group_ranks(group)
    if ranks == members:
        return Group(name, tuple(range(len(ranks))), in_order=True)
    # A wrong call of DeviceMesh.from_group can give an axis a group of other ranks.
    if sorted(ranks) != sorted(members):
        raise NotPlanned(
            f"the group over axes {axes} of {mesh} holds {ranks}, not {members}"
        )
    group_rank = {rank: number for number, rank in enumerate(ranks)}
    return Group(name, tuple(group_rank[rank] for rank in members), in_order=False)


def wrong_order(mesh: DeviceMesh) -> str | None:
    """Say which axis of a mesh has a group with its ranks in another order; None if
    none. DTensor scatters in the order of the group and cuts in that of the mesh, so
    nobody knows which shard a rank holds. The mesh must have process groups, and
    contain this rank. What is found is remembered."""
    known = shared_state(mesh).remembered.orders
    key = view_of(mesh), tuple(group_names(mesh) or ())
    if key not in known:
        if len(known) >= REMEMBERED:
            known.clear()
        wrong = [_wrong_axis(mesh, axis) for axis in range(mesh.ndim)]
        known[key] = next(filter(None, wrong), None)
    return known[key]


def _wrong_axis(mesh: DeviceMesh, axis: int) -> str | None:
    """`wrong_order` of one axis."""
    name = group_names(mesh)[axis]  # type: ignore[index]
    group = find_group(name)
    # A group that is gone is an error elsewhere, and so is one over other ranks.
    if group is None:
        return None
    ranks, members = get_process_group_ranks(group), members_along(mesh, (axis,))
    wrong = ranks != members and sorted(ranks) == sorted(members)
    advice = "Make these groups by new_group(ranks, sort_ranks=False)."
    if not wrong and _sorts_elsewhere(mesh, axis, group):  # overlay only
        wrong = True  # overlay only
    if shared_state(mesh).made_by_torch:  # overlay only
        advice = "Make the mesh after torch_overlay.enable()."  # overlay only
    if not wrong:
        return None
    axis_name = axis_names(mesh._mesh_dim_names, mesh.ndim)[axis]
    return (
        f"The groups of axis {axis_name!r} of {mesh} hold their ranks in another order "
        f"than the mesh, which is over {of_ranks(mesh.mesh.flatten().tolist())}; that "
        f"of rank {dist.get_rank()} is over {of_ranks(ranks)}. Shards would be taken "
        f"for those of other ranks. {advice}"
    )


def _sorts_elsewhere(mesh: DeviceMesh, axis: int, group: Any) -> bool:  # overlay only
    """True if torch's own code made the groups of an axis, sorted, and some rank has
    one in another order. All ranks get the same result, also those whose own is in
    order."""
    shared = shared_state(mesh)
    if not shared.made_by_torch or getattr(mesh, "_preserve_rank_order", False):
        return False
    # The user made the groups of from_group, and this code those of newer views.
    made = shared.universe.table.entries.values() if shared.universe else ()
    ours = any(entry.group_name == group.group_name for entry in made)
    if ours or not group.group_desc.startswith(("mesh_", "default_pg")):
        return False
    view = view_of(mesh).with_layout(view_of(mesh).layout.select((axis,)))
    copies = (view.ranks(view.rank_map[start]) for start in view.copies())
    return any(list(ranks) != sorted(ranks) for ranks in copies)


def members_along(mesh: DeviceMesh, axes: Sequence[int]) -> list[int]:
    """Return the ranks that differ from this one on these axes only, in mesh order."""
    view = view_of(mesh)
    return view.with_layout(view.layout.select(axes)).ranks(mesh._rank)


def _axis_group_name(mesh: DeviceMesh, axis: int) -> str:
    name = mesh._dim_group_names[axis]
    if name.startswith(UNBOUND):
        # A mesh that was unpickled without its groups has a placeholder as name.
        mesh.get_group(axis)  # raises, and says which ranks have no group
    return name


def gone(mesh: DeviceMesh, axes: Sequence[int]) -> str:
    """Return the message of an error about a process group that was destroyed."""
    names = axis_names(mesh._mesh_dim_names, mesh.ndim)
    return (
        "A redistribution needs the process group over "
        f"{', '.join(names[axis] for axis in axes)} of {mesh}, ranks "
        f"{members_along(mesh, axes)}, and it is gone: this process destroyed it, by "
        "destroy_process_group or abort() on "
        "this mesh or on a view of it. Make the mesh anew on all of its ranks."
    )
