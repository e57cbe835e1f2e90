"""Where one mesh stands for another: in caches, in which two equal meshes are one
although each has groups of its own, and in traces, which copy a mesh.

The sharding caches give results with the mesh that was there first. So an entry is
found only by a mesh that is as good as the one in it, and caches are emptied before
equal meshes, one built after the other, pile up in them.
"""

from __future__ import annotations

import hashlib
import operator
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import device_mesh

from .state import group_names, shared_state
from .universe import making_private

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .state import SharedState


def real_mesh(mesh: Any) -> DeviceMesh:
    """The mesh itself: under tracing a wrapper may come, whose attributes aren't all
    the mesh's."""
    return getattr(mesh, "real_obj", mesh)


def is_traced() -> bool:
    """Whether dynamo reads this code. Dynamo can't make meshes; a view must be an
    attribute that it can guard."""
    return torch.compiler.is_dynamo_compiling()


def traced_view(mesh: DeviceMesh, method: str, *arguments: Any) -> DeviceMesh:
    """What a method of the mesh gives, as an input of the graph: made once, when the
    code is compiled."""
    name = mesh._trace_view(method, *map(_fixed, arguments))
    return getattr(mesh._get_root_mesh()._traced_views, name)


def compiled_group_key(mesh: DeviceMesh) -> tuple[Any, ...]:
    """What compiled code is guarded by beside the mesh's value: it may have names of
    groups in it, of views that it made, too. Those of an equal mesh may be others, and
    are after abort()."""
    universe = shared_state(mesh).universe
    return group_names(mesh), universe.serial if universe is not None else None


def _fixed(argument: Any) -> Any:
    """The same, with numbers that the compiler would leave open: each other number
    makes another view."""
    if isinstance(argument, dict):
        return {name: _fixed(value) for name, value in argument.items()}
    if isinstance(argument, (list, tuple)):
        return tuple(map(_fixed, argument))
    return operator.index(argument) if isinstance(argument, int) else argument


def keep_view(mesh: DeviceMesh, method: str, arguments: tuple[Any, ...]) -> str:
    """Make a view for compiled code and keep it with the universe; returns the name by
    which `_traced_views` has it.

    It is made once, however often the code is compiled: another rank may compile once
    more, or less, and a view may need groups.
    """
    traced = shared_state(mesh).traced
    said = (
        f"{method}{_said(arguments)} of {mesh._stable_hash()} on "
        f"{group_names(mesh)}, {making_private.get()}"
    )
    name = f"view_{hashlib.blake2b(said.encode(), digest_size=16).hexdigest()}"
    if not hasattr(traced, name):
        setattr(traced, name, getattr(mesh, method)(*arguments))
    return name


def forget_views(shared: SharedState) -> None:
    """Let compiled code make its views anew."""
    vars(shared.traced).clear()


def _said(argument: Any) -> str:
    if isinstance(argument, (list, tuple)):
        return f"({', '.join(map(_said, argument))})"
    return (
        f"{argument._stable_hash()} on {group_names(argument)}"
        if hasattr(argument, "_stable_hash")
        else repr(argument)
    )


# The root that was built last over some ranks, by these, while anybody holds it: maybe
# the caches alone.
_latest: weakref.WeakValueDictionary[tuple[Any, ...], SharedState] = (
    weakref.WeakValueDictionary()
)


def as_good_as(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Whether of two equal meshes one may stand for the other: they are of one
    universe, as copies, slices and loaded meshes are, and their axes have the same
    groups. Two that have no universe, as those of `from_group`, need the same groups.
    For a subclass of DeviceMesh, equality is enough.

    >>> as_good_as(mesh["tp"], mesh["tp"])  # doctest: +SKIP
    True
    >>> as_good_as(mesh, built_alike)  # doctest: +SKIP
    False
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
    return one.universe is not None or all(
        one.registry.get(name) is two.registry.get(name) for name in names or ()
    )


def forget_shardings_of_equal_root(shared: SharedState) -> None:
    """Empty the caches where an equal root was built before that somebody holds: it may
    be held by them alone."""
    key = shared.rank_map.key
    if key in _latest:
        forget_shardings()
    _latest[key] = shared


def forget_shardings(_: None = None) -> None:
    """Empty the caches of how operations on DTensors are sharded, which hold the meshes
    of their results.

    Those of C++ and of the propagator are one for each thread, and this thread's are
    emptied: others give results on a mesh that is as good (`as_good_as`), so they may
    stay.
    """
    if "torch.distributed.tensor._api" not in sys.modules:
        return
    # these import meshes, and so this file
    from torch.distributed.tensor import _collective_utils, _redistribute
    from torch.distributed.tensor._api import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
    propagator._propagate_tensor_meta_cached.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()  # type: ignore[attr-defined]
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
