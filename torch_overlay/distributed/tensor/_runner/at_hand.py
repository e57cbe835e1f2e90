"""Groups at hand: over which sets of a mesh's axes a plan may communicate, and by which
process group.

All ranks answer alike, since the answer follows from the mesh calls of the universe and
the options; which groups other meshes have, or which are still alive, has no part in
it. In which order a group holds its ranks is its own affair; `Group` says at which
place each member of the joint axes sits.

A mesh stands in caches as its site: the mesh as one rank sees it, as a value, so that
the mesh may go.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import ProcessGroup, get_process_group_ranks

from ..._mesh.groups import joint_group_name, joint_groups_known, sets_of_axes
from ..._mesh.pickling import UNBOUND
from ..._mesh.state import axis_names, group_names, shared_state, view_of
from ..._mesh.universe import Settings, find_group, get_settings
from .._planner.regions import NotPlanned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from ..._mesh.rank_map import View


class Site(NamedTuple):
    """Where a redistribution happens: a mesh as this rank sees it.

    Attributes:
        view: the mesh's layout over the ranks of its universe.
        names: of its axes, or None.
        coordinate: of this rank.
        groups: the names of this rank's groups, by axis.
        joint: which groups over several axes its universe has, see
            `joint_groups_known`.
        settings: the options in force.
        device: the type of device of its tensors.
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
        """Of a mesh that has groups and this rank."""
        return Site(
            view_of(mesh),
            mesh._mesh_dim_names,
            tuple(mesh._coordinate_on_dim or ()),
            tuple(group_names(mesh) or ()),
            joint_groups_known(mesh),
            get_settings(),
            mesh.device_type,
        )


REMEMBERED = 1024  # meshes of one universe


class Group(NamedTuple):
    """A process group as a plan's step needs it.

    Attributes:
        name: by which collectives find it.
        places: for each member, row-major over the step's axes, its rank in the group.
        in_order: whether these are 0, 1, 2...
    """

    name: str
    places: tuple[int, ...]
    in_order: bool


class AtHand(NamedTuple):
    """The groups of a mesh.

    Attributes:
        joint: the sets of axes, two and more, that have one.
        known: whether all of them are of built-in classes, which can do all that a plan
            may ask for.
        found: those that were looked up.
    """

    joint: frozenset[tuple[int, ...]]
    known: bool
    found: dict[tuple[int, ...], Group]

    def find(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> Group:
        """This rank's group over some axes of the mesh; of one axis, the mesh's own.

        Raises:
            RuntimeError: it was destroyed. There is no second plan, since other ranks
                can't know.
            NotPlanned: there is none, which `joint` says before; or it holds other
                ranks.
        """
        found = self.found.get(axes)
        if found is None:
            found = self.found[axes] = _look_up(mesh, axes)
        elif find_group(found.name) is None:
            raise RuntimeError(gone(mesh, axes))
        return found


def joint_axes(mesh: DeviceMesh) -> frozenset[tuple[int, ...]]:
    """The sets of axes, two and more, for which a group is at hand; none of size 1."""
    return at_hand(mesh, Site.of(mesh)).joint


def at_hand(mesh: DeviceMesh, site: Site) -> AtHand:
    """What is at hand on a mesh, as this rank sees it."""
    known = shared_state(mesh).remembered.at_hand
    found = known.get(site)
    if found is None:
        if len(known) >= REMEMBERED:
            known.clear()
        joint = frozenset(
            [
                axes
                for axes in sets_of_axes(mesh)
                if joint_group_name(mesh, axes) is not None
            ]
        )
        found = known[site] = AtHand(joint, has_known_backends(mesh), {})
    return found


def has_known_backends(mesh: DeviceMesh) -> bool:
    """Whether the groups of a mesh are of built-in classes, and not of somebody's,
    which may lack collectives. All ranks have the same."""
    groups = [find_group(name) for name in group_names(mesh) or ()]
    return all(
        _backend_class(group, mesh.device_type).__module__.startswith("torch.")
        for group in groups
        if group
    )


def _backend_class(group: ProcessGroup, device_type: str) -> type:
    if type(group) is ProcessGroup:
        # it has none for this type of device, which is an error by itself
        with contextlib.suppress(RuntimeError):
            return type(group._get_backend(torch.device(device_type)))
    return type(group)


def _look_up(mesh: DeviceMesh, axes: Sequence[int]) -> Group:
    members = _members(mesh, axes)
    name = _own_name(mesh, axes[0]) if len(axes) == 1 else joint_group_name(mesh, axes)
    if name is None:
        raise NotPlanned(f"no group over axes {axes} of {mesh}")
    group = find_group(name)
    if group is None:
        raise RuntimeError(gone(mesh, axes))
    ranks = get_process_group_ranks(group)
    if ranks == members:
        return Group(name, tuple(range(len(ranks))), in_order=True)
    # DeviceMesh.from_group may be given such groups, which is an error by itself
    if sorted(ranks) != sorted(members):
        raise NotPlanned(
            f"the group over axes {axes} of {mesh} holds {ranks}, not {members}"
        )
    place = {member: number for number, member in enumerate(ranks)}
    return Group(name, tuple(place[member] for member in members), in_order=False)


def _members(mesh: DeviceMesh, axes: Sequence[int]) -> list[int]:
    """This rank and those from which it differs on these axes only, in the order of the
    mesh."""
    view = view_of(mesh)
    return view.show(view.layout.select(axes)).ranks(mesh._rank)


def _own_name(mesh: DeviceMesh, axis: int) -> str:
    name = mesh._dim_group_names[axis]
    if name.startswith(UNBOUND):
        mesh.get_group(axis)  # raises, and says which ranks have no group
    return name


def gone(mesh: DeviceMesh, axes: Sequence[int]) -> str:
    """What to say of a group that a plan needs and that isn't there any more."""
    names = axis_names(mesh._mesh_dim_names, mesh.ndim)
    return (
        "A redistribution needs the process group over "
        f"{', '.join(names[axis] for axis in axes)} of {mesh}, ranks "
        f"{_members(mesh, axes)}, and it is gone: this process destroyed it, by "
        "destroy_process_group or abort() on "
        "this mesh or on a view of it. Make the mesh anew on all of its ranks."
    )
