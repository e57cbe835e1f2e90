"""What is remembered by the value of a mesh, where two equal meshes are two: each has groups of its own.

The sharding caches give results with the mesh that was there first. So an entry is found only by a mesh that is as
good as the one in it, and caches are emptied before equal meshes, one built after the other, pile up in them.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

from torch.distributed import device_mesh

from ._mesh_group_names import group_names
from ._mesh_state import shared_state
from ._mesh_traced import real_mesh
from ._torch_caches import clear_sharding_caches

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ._shared_state import SharedState

# The root that was built last over some ranks, by these, while anybody holds it: maybe the caches alone.
_latest: weakref.WeakValueDictionary[tuple[Any, ...], SharedState] = weakref.WeakValueDictionary()


def as_good_as(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Whether of two equal meshes one may stand for the other: they are of one universe, as copies, slices and loaded
    meshes are, and their axes have the same groups. Two that have no universe, as those of `from_group`, need the same
    groups. For a subclass of DeviceMesh, equality is enough.

    >>> as_good_as(mesh["tp"], mesh["tp"]), as_good_as(mesh, built_alike)  # doctest: +SKIP
    (True, False)
    """
    if mesh is other:
        return True
    mesh, other = real_mesh(mesh), real_mesh(other)
    if mesh is other or {type(mesh), type(other)} != {device_mesh.DeviceMesh}:
        return True
    names = group_names(mesh)
    if names != group_names(other):
        return False
    one, two = shared_state(mesh), shared_state(other)
    if one is two or one.universe is not two.universe:
        return one is two
    # Names of groups come again in the next world.
    return one.universe is not None or all(one.registry.get(name) is two.registry.get(name) for name in names or ())


def note_root(shared: SharedState) -> None:
    """Empty the caches where an equal root was built before that somebody holds: it may be held by them alone."""
    key = shared.rank_map.key
    if key in _latest:
        forget_shardings()
    _latest[key] = shared


def forget_shardings(_: None = None) -> None:
    """Forget, in this thread, how operations on DTensors are sharded, and with that the meshes of their results."""
    if "torch.distributed.tensor._api" in sys.modules:
        clear_sharding_caches()
