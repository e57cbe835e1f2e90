"""Joint groups: which process group serves several axes of a mesh together.

Whether one is there is told from what every rank has, the history of mesh calls, so that all ranks plan alike: a group
is at hand if some mesh over the same rank map, or the world, has an axis over exactly these ranks. In which order a
group holds its ranks is its own affair; `Group` says at which place each member of the joint axes sits.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroup, get_backend, get_process_group_ranks

from .._group_table import group_table, groups_epoch
from .._mesh_state import shared_state, view_of
from .._process_groups import Request, axis_group, members_create
from .._settings import Settings, get_settings
from ._regions import NotOurs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from .._layout import Layout, MeshLayout

Names = tuple[str, ...]
Known = tuple[int, tuple[Names, ...]]


class Group(NamedTuple):
    """A process group as a plan's step needs it.

    Attributes:
        name: by which torch's collectives find it.
        places: for each member, row-major over the step's axes, its rank in the group.
    """

    name: str
    places: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        return self.places == tuple(range(len(self.places)))


def groups_known(mesh: DeviceMesh) -> Known:
    """Changes whenever there may be another joint group for a mesh, for whoever remembers which there are. A view that
    is flattened may make no group and still be what `options.flatten = "existing"` waits for; under the same name an
    equal mesh may have another, over other axes or with a group of its own."""
    flattened = shared_state(mesh).flattened
    return groups_epoch(), tuple([(name, *v.__dict__.get("_dim_group_names", ())) for name, v in flattened.items()])


def joint_axes(mesh: DeviceMesh) -> frozenset[tuple[int, ...]]:
    """The sets of axes, two and more, for which a group is at hand; none of size 1."""
    if mesh.ndim == 1:
        return frozenset()
    return _joint_axes(mesh, tuple(mesh._dim_group_names), groups_known(mesh), get_settings())


@lru_cache(maxsize=256)
def _joint_axes(mesh: DeviceMesh, own: Names, known: Known, settings: Settings) -> frozenset[tuple[int, ...]]:
    axes = [axis for axis, size in enumerate(mesh.shape) if size > 1]
    subsets = itertools.chain.from_iterable(itertools.combinations(axes, count) for count in range(2, len(axes) + 1))
    if _may_create():
        return frozenset(subsets)
    found = {layout.ascending() for layout in _layouts(mesh)}
    layout = view_of(mesh).layout
    return frozenset(subset for subset in subsets if layout.select(subset).joint().ascending() in found)


def _layouts(mesh: DeviceMesh) -> Iterator[Layout]:
    """Axes over the mesh's rank map that have groups, on every rank alike."""
    for flattened in shared_state(mesh).flattened.values():
        if "_dim_group_names" in flattened.__dict__:
            yield view_of(flattened).layout.axes[0]
    if get_settings().flatten != "existing" and _on_default_backend(mesh):
        yield from group_table().layouts(view_of(mesh).rank_map)


def _on_default_backend(mesh: DeviceMesh) -> bool:
    """Whether groups without options of their own serve the mesh's tensors; the same on all its ranks. Not where a
    group of the mesh is gone, or it is a mesh of a world that is."""
    default = get_backend()
    try:
        return all(get_backend(mesh.get_group(axis)) == default for axis in range(mesh.ndim))
    except RuntimeError:
        return False


def _may_create() -> bool:
    """Whether the members may make a group in the middle of a step, when nobody else is there to take part."""
    return get_settings().flatten == "create" and members_create(distributed_c10d._get_default_group(), None)


def find_group(mesh: DeviceMesh, axes: Sequence[int], rank: int) -> Group:
    """This rank's group over some axes of a mesh; of one axis, the mesh's own.

    Raises:
        NotOurs: there is none; `joint_axes` says for which there is.
    """
    return _find_group(mesh, tuple(axes), rank, tuple(mesh._dim_group_names), groups_known(mesh), get_settings())


@lru_cache(maxsize=256)
def _find_group(
    mesh: DeviceMesh, axes: tuple[int, ...], rank: int, own: Names, known: Known, settings: Settings
) -> Group:
    view = view_of(mesh)
    joint = view.layout.select(axes)
    index = view.rank_map.index(rank)
    if index is None:
        raise AssertionError(f"rank {rank} isn't in {mesh}, so it has no part in its collectives")
    start = joint.origin(index)
    members = [view.rank_map[start + offset] for offset in joint.joint().indices()]
    group = mesh.get_group(axes[0]) if len(axes) == 1 else _joint(mesh, joint, rank)
    if group is None:
        raise NotOurs(f"no group over axes {axes} of {mesh}")
    ranks = get_process_group_ranks(group)
    if ranks == members:
        return Group(group.group_name, tuple(range(len(ranks))))
    if sorted(ranks) != sorted(members):
        raise NotOurs(f"the group over axes {axes} of {mesh} holds {ranks}, not {members}")
    place = {member: number for number, member in enumerate(ranks)}
    return Group(group.group_name, tuple(place[member] for member in members))


def forget_groups() -> None:
    """Look again at the next request."""
    _joint_axes.cache_clear()
    _find_group.cache_clear()


def _joint(mesh: DeviceMesh, joint: MeshLayout, rank: int) -> ProcessGroup | None:
    wanted = joint.joint().ascending()
    for flattened in shared_state(mesh).flattened.values():
        names = flattened.__dict__.get("_dim_group_names")
        if names and view_of(flattened).layout.axes[0].ascending() == wanted:
            return flattened.get_group()
    if get_settings().flatten != "existing" and _on_default_backend(mesh):
        group = group_table().group_of(view_of(mesh), wanted, rank)
        if group is not None:
            return group
    if _may_create():
        return axis_group(Request(view_of(mesh), joint.joint(), "joint", (None, None), mesh.device_type))
    return None
