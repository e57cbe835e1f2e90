"""Where one mesh is used in place of an equal one: in caches that are keyed by meshes,
and in compiled code, which holds a copy of a mesh.

Start at `as_good_as`. Two meshes that were built alike compare equal, although each has
process groups of its own. The caches of sharding results hold meshes and look them up
by value, so a result could lie on the wrong one of two. Therefore `as_good_as` is asked
before a result is used, and `forget_shardings_of_equal_root` empties the caches before
equal meshes pile up in them.
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
    """The mesh itself: while a graph is traced, a wrapper may come in its place."""
    return getattr(mesh, "real_obj", mesh)


def is_traced() -> bool:
    """True while dynamo traces this code. It can't make a mesh: views are
    attributes."""
    return torch.compiler.is_dynamo_compiling()


def traced_view(mesh: DeviceMesh, method: str, *arguments: Any) -> DeviceMesh:
    """The view that ``method`` returns, as an input of the graph, made once, when code
    is compiled. Call it only while dynamo traces, see `is_traced`."""
    name = mesh._trace_view(method, *map(_with_fixed_numbers, arguments))
    return getattr(mesh._get_root_mesh()._traced_views, name)


def compiled_group_key(mesh: DeviceMesh) -> tuple[Any, ...]:
    """The values that guard compiled code, beside the value of the mesh: the names of
    its groups, which the code may contain, and the serial of its universe. An equal
    mesh may have other groups, and so has this mesh after abort()."""
    universe = shared_state(mesh).universe
    return group_names(mesh), universe.serial if universe is not None else None


def _with_fixed_numbers(argument: Any) -> Any:
    """The argument with plain ints for symbolic ones: each number makes another
    view."""
    if isinstance(argument, dict):
        return {name: _with_fixed_numbers(value) for name, value in argument.items()}
    if isinstance(argument, (list, tuple)):
        return tuple(map(_with_fixed_numbers, argument))
    return operator.index(argument) if isinstance(argument, int) else argument


def keep_view(mesh: DeviceMesh, method: str, arguments: tuple[Any, ...]) -> str:
    """Make a view for compiled code, once, and return its name in `_traced_views`.
    Collective if the method makes groups."""
    traced = shared_state(mesh).traced
    description = (
        f"{method}{_argument_text(arguments)} of {mesh._stable_hash()} on "
        f"{group_names(mesh)}, {making_private.get()}"
    )
    name = f"view_{hashlib.blake2b(description.encode(), digest_size=16).hexdigest()}"
    # Made once, however often the code is compiled. A view may need groups, which are
    # collective to make, and another rank may compile more or less often.
    if not hasattr(traced, name):
        setattr(traced, name, getattr(mesh, method)(*arguments))
    return name


def forget_views(shared: SharedState) -> None:
    """Drop the views that compiled code keeps with a universe. It makes them again."""
    vars(shared.traced).clear()


def _argument_text(argument: Any) -> str:
    """An argument as text. A mesh's has its groups' names: equal meshes may differ
    there."""
    if isinstance(argument, (list, tuple)):
        return f"({', '.join(map(_argument_text, argument))})"
    return (
        f"{argument._stable_hash()} on {group_names(argument)}"
        if hasattr(argument, "_stable_hash")
        else repr(argument)
    )


# For each rank map, the shared state of the root mesh that was built last. Weak: the
# entry goes with the last mesh of the universe. If it is still here, something holds
# one of these meshes, perhaps only a cache.
_latest: weakref.WeakValueDictionary[tuple[Any, ...], SharedState] = (
    weakref.WeakValueDictionary()
)


def as_good_as(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """True if, of two meshes that are equal, one may be used in place of the other:
    both are of one universe, as copies, slices and loaded meshes are, with the same
    groups.

    Without a universe, as from `from_group`, they need the same group objects; of a
    subclass of DeviceMesh, equality is enough.

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
    state, other_state = shared_state(mesh), shared_state(other)
    if state is other_state or state.universe is not other_state.universe:
        return state is other_state
    # Compare objects, not names: c10d gives the same names again after
    # destroy_process_group and init_process_group.
    return state.universe is not None or all(
        state.registry.get(name) is other_state.registry.get(name)
        for name in names or ()
    )


def forget_shardings_of_equal_root(shared: SharedState) -> None:
    """Empty the caches of sharding results if another root mesh over the same ranks in
    the same order still lives: these caches may hold it. Call it once for each new
    root."""
    key = shared.rank_map.key
    if key in _latest:
        forget_shardings()
    _latest[key] = shared


def forget_shardings(_: None = None) -> None:
    """Empty the caches of how operations on DTensors are sharded, which hold meshes.
    Two of them exist once for each thread: those of other threads stay, and
    `as_good_as` checks their results."""
    # Without DTensor there is nothing to empty, and a program that only builds meshes
    # shouldn't import it.
    if "torch.distributed.tensor._api" not in sys.modules:
        return
    # Not at the top: these modules import device_mesh, and that imports this file.
    from torch.distributed.tensor import _collective_utils, _redistribute
    from torch.distributed.tensor._api import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
    propagator._propagate_tensor_meta_cached.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()  # type: ignore[attr-defined]
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
