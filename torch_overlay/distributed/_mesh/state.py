"""The attributes that a DeviceMesh holds: its view, and the state that a root mesh
shares with its slices and its flattened and unflattened views.

Start at `SharedState`, then `view_of` and `shared_state`, which read them off a mesh,
and `make_view`, which makes every new view.

A view holds a reference to the shared state, and nothing else that grows with the
world. What other code reads off a mesh, the rank map as a tensor and as a tuple, is
computed once, when it is first read.

Not every mesh was made by this file. One that was made by older code, by a subclass
that skips `__init__`, or by unpickling has the plain attributes only. It gets its state
when that is first read (`_build_state`).
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import device_mesh
from torch.distributed.distributed_c10d import (
    get_backend,
    get_rank,
    get_world_size,
    is_initialized,
)
from torch.utils._python_dispatch import _disable_current_modes

from .._mesh_layout import _MeshLayout
from .._torch import from_torch, to_torch
from .rank_map import RankMap, View
from .universe import join_universe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from .universe import Universe


def group_names(mesh: DeviceMesh) -> list[str] | None:
    """The mesh's own list of this rank's groups by mesh dim; [] outside, None
    without."""
    return getattr(mesh, "_dim_group_names", None)


# The shared states of the meshes that live: `status()` counts them, and
# `forget_answers` clears what they remember.
states: weakref.WeakSet[SharedState] = weakref.WeakSet()  # overlay only


class TracedViews:
    """The views that compiled code made, each as an attribute. Dynamo looks up an
    attribute each time a graph reads it; of a dict it would use what it held at the
    first read."""


@dataclass
class Remembered:
    """Caches of redistributions over the meshes of one universe.

    Attributes:
        at_hand: the groups that each call site can use, see tensor/_runner/at_hand.py.
        answers: by question; each is made once, see tensor/_runner/answers.py.
        orders: by view and groups, what `wrong_order` found.
        specs: the attributes of result specs, without the mesh.
    """

    at_hand: dict[Any, Any] = field(default_factory=dict)
    answers: dict[Any, Any] = field(default_factory=dict)
    orders: dict[Any, str | None] = field(default_factory=dict)
    specs: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)


class SharedState:
    """What a root mesh shares with all its views: one object for each universe of
    meshes.

    Attributes:
        rank_map: from index to rank and back.
        flattened: the flattened views by name, the mesh's ``_flatten_mapping``. Other
            code may write it.
        registry: the process groups by name, the mesh's ``_pg_registry``.
        private: a token that tells private universes apart, and is part of the value of
            their meshes; None if the universe isn't private.
        universe: the groups in this world, see `universe_of`. None before the first
            request for one.
        traced: the views that compiled code made.
        saved_number: for a loaded mesh, the number of the universe that it was saved
            from.
        remembered: caches of redistributions. They are freed with the last mesh of the
            universe.
    """

    def __init__(self, rank_map: RankMap, private: str | None = None) -> None:
        self.rank_map = rank_map
        self.flattened: dict[str, DeviceMesh] = {}
        self.registry: dict[str, ProcessGroup] = {}
        self.private = private
        self.universe: Universe | None = None
        self.saved_number: int | None = None
        # True if torch's own code made the root mesh, whose groups are sorted then.
        self.made_by_torch = False  # overlay only
        self.remembered = Remembered()
        states.add(self)  # overlay only
        self.traced = TracedViews()
        self._tensor: torch.Tensor | None = None
        self._ranks: tuple[int, ...] | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The rank map as a tensor: one dimension, int32, CPU. The first call makes
        it."""
        if self._tensor is None:
            # The tensor is kept for later callers, so it must be a real one, also where
            # the first caller is under a fake, meta, proxy or inference mode.
            with _disable_current_modes(), torch.inference_mode(False):
                if self.rank_map.is_identity:
                    self._tensor = torch.arange(
                        self.rank_map.numel, dtype=torch.int, device="cpu"
                    )
                else:
                    self._tensor = torch.tensor(
                        self.rank_map.ranks(), dtype=torch.int, device="cpu"
                    )
        return self._tensor

    def shown(self, layout: _MeshLayout, start: int) -> torch.Tensor:
        """The ranks of the copy of ``layout`` that starts at index ``start``, as a view
        of `tensor`, so don't write to it: it costs the same for a million ranks as for
        eight. An axis of several modes has no single stride: there `reshape` copies."""
        shape = [size for axis in layout.axes for size in axis.shape]
        stride = [step for axis in layout.axes for step in axis.stride]
        return self.tensor.as_strided(shape, stride, start).reshape(
            layout.top_level_sizes
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank map as a tuple. The first call computes it."""
        if self._ranks is None:
            self._ranks = tuple(self.rank_map.ranks())
        return self._ranks


# Two threads that first read a mesh's state must get the same object.
_building = threading.RLock()

# Every mesh that lacks an attribute which DeviceMesh stores without this code, by id,
# so that `hand_back` can restore it. Weak, so that being listed keeps no mesh alive. By
# id, since equal meshes must be listed one by one.
_living: Any = weakref.WeakValueDictionary()  # overlay only


class InUniverse(NamedTuple):
    """The attribute ``_in_universe`` of a mesh. A mesh without it gets it when it is
    first read.

    Attributes:
        view: the mesh's view over the rank map of its universe.
        shared: the state that it shares with its root mesh and all views of the root.
    """

    view: View
    shared: SharedState


def view_of(mesh: DeviceMesh) -> View:
    """The mesh's view over its universe's rank map; made here if needed
    (`_build_state`)."""
    in_universe = mesh.__dict__.get("_in_universe")
    return (_build_state(mesh) if in_universe is None else in_universe).view


def shared_state(mesh: DeviceMesh) -> SharedState:
    """What a mesh shares with its root and all views; made here if needed
    (`_build_state`)."""
    in_universe = mesh.__dict__.get("_in_universe")
    return (_build_state(mesh) if in_universe is None else in_universe).shared


def state_over(rank_map: RankMap, root: SharedState | None) -> SharedState:
    """The root's state if it is over the same ranks, else a new one with the root's
    registry: get_group and compiled code look there for the groups of a view."""
    if root is not None and root.rank_map == rank_map:
        return root
    shared = SharedState(rank_map)
    if root is not None:
        shared.registry = root.registry
    return shared


def join_state(mesh: DeviceMesh, view: View, root: DeviceMesh | None) -> SharedState:
    """Give a new mesh its state, and return it, as `state_over` does."""
    shared = state_over(view.rank_map, None if root is None else shared_state(root))
    # The root's rank map and not an equal one: views over one map compare in no time.
    put_state(mesh, View(shared.rank_map, view.layout), shared)
    return shared


def put_state(mesh: DeviceMesh, view: View, shared: SharedState) -> None:
    """Store the state in a mesh as ``_in_universe``, and its layout as ``_layout``."""
    mesh._layout = to_torch(view.layout)
    mesh.__dict__["_in_universe"] = InUniverse(view, shared)
    _forget_coordinates(mesh)  # overlay only
    _living[id(mesh)] = mesh  # overlay only


def _forget_coordinates(mesh: DeviceMesh) -> None:  # overlay only
    """Drop the entry of LocalTensorMode for the id of a new mesh. Before 2.14 the mode
    keeps coordinates by id, and a slice often has the id of one that was just freed."""
    local_tensor = sys.modules.get("torch.distributed._local_tensor")
    for mode in (
        local_tensor.get_local_tensor_mode_list() if local_tensor is not None else ()
    ):
        getattr(mode, "_coordinate_cache", {}).pop(id(mesh), None)


def _build_state(mesh: DeviceMesh) -> InUniverse:
    """Build and store the state of a mesh that has none; not where it forwards to
    another."""
    with _building:
        if "_in_universe" not in mesh.__dict__:
            forwarded = _forwarded_state(mesh)
            if forwarded is not None:
                return forwarded
            _read_state(mesh)
        return mesh.__dict__["_in_universe"]


def _forwarded_state(mesh: DeviceMesh) -> InUniverse | None:
    """The state of the mesh to which this one forwards by `__getattr__`, as a lazily
    built subclass does; None if there is none. It isn't stored: such a class may build
    its mesh later, or another one after a failure."""
    forward = getattr(type(mesh), "__getattr__", None)
    if "_layout" in mesh.__dict__ or forward is None:
        return None
    try:
        forward(mesh, "_hash_key")()  # makes the other mesh read its own state
        in_universe = forward(mesh, "_in_universe")
    except AttributeError:
        return None
    return in_universe if isinstance(in_universe, InUniverse) else None


_STORED_NAMES = (
    "_layout",
    "_rank_map",
    "_flatten_rank_map",
    "_root_mesh",
    "_flatten_mapping",
    "_pg_registry",
)


def _stored_attributes(mesh: DeviceMesh) -> dict[str, Any]:
    """A mesh's ``__dict__``, or a copy with what `__getattr__` of its class
    forwards."""
    attributes, forward = mesh.__dict__, getattr(type(mesh), "__getattr__", None)
    if "_layout" in attributes or forward is None:
        return attributes
    with_forwarded = dict(attributes)
    # `getattr` would reach our cached properties of the same names, and these read the
    # state that is about to be built. So ask `__getattr__` alone.
    for name in _STORED_NAMES:
        with contextlib.suppress(AttributeError):
            with_forwarded.setdefault(name, forward(mesh, name))
    return with_forwarded


def stored_ranks(attributes: dict[str, Any]) -> RankMap:
    """The rank map in the stored attributes of a mesh."""
    # A subclass that builds its own attributes, or an older pickle, may lack the tuple.
    if "_flatten_rank_map" in attributes:
        return RankMap(attributes["_flatten_rank_map"])
    if "_rank_map" in attributes:
        return RankMap(attributes["_rank_map"].tolist())
    raise AttributeError(
        "this DeviceMesh has no ranks yet: neither its constructor nor __setstate__() "
        "has run"
    )


def _has_ranks_of_root(attributes: dict[str, Any], root: Any) -> bool:
    """True if a mesh is known to hold the ranks of its root: the same objects, or none.
    One that was made with ``_root_mesh`` may hold others; equal ones count as
    others."""
    stored = [name for name in ("_rank_map", "_flatten_rank_map") if name in attributes]
    # A view that was made or loaded with its root holds the very same objects, so
    # comparing by identity is enough, and reads no ranks.
    return not stored or any(
        attributes[name] is root.__dict__.get(name) for name in stored
    )


def _read_state(mesh: DeviceMesh) -> None:
    """Build the state of a mesh from its stored attributes, and store it."""
    attributes = _stored_attributes(mesh)
    root = getattr(mesh, "_root_mesh", None)
    # A loaded mesh says which universe it was saved from, see `saved_state`.
    made_by_torch = "_universe" not in attributes  # overlay only
    number, private = attributes.pop("_universe", (None, None))
    registry = attributes.setdefault("_pg_registry", {})
    root_state = None if root is None or root is mesh else shared_state(root)
    rank_map = (
        root_state.rank_map
        if root_state is not None and _has_ranks_of_root(attributes, root)
        else stored_ranks(attributes)
    )
    shared = state_over(rank_map, root_state)
    if shared is not root_state:
        shared.private = private
        shared.saved_number = number
        shared.made_by_torch = made_by_torch  # overlay only
        join_universe(shared)
    if root_state is None:
        shared.flattened = attributes.setdefault("_flatten_mapping", {})
        shared.registry = registry
    else:
        shared.registry.update(registry)
    view = View(shared.rank_map, from_torch(mesh._layout))
    mesh.__dict__["_in_universe"] = InUniverse(view, shared)
    _living[id(mesh)] = mesh  # overlay only


def make_view(
    parent: DeviceMesh,
    layout: _MeshLayout,
    names: Sequence[str] | None,
    groups: Sequence[str] | None,
) -> DeviceMesh:
    """A new mesh over the universe of ``parent``: every view comes from here, with no
    new groups."""
    root = parent._get_root_mesh()
    mesh = _new_mesh(parent, root, names)
    put_state(mesh, view_of(parent).with_layout(layout), shared_state(parent))
    return _set_rank_and_groups(mesh, parent, groups)


# The attributes of a mesh that differ from rank to rank.
RANK_ATTRIBUTES = ("_rank", "_coordinate_on_dim", "_dim_group_names")


@dataclass(frozen=True)
class SavedAttributes:
    """Attributes of the rank that saved a mesh. They are set aside after loading, until
    this process knows its own rank and groups.

    Attributes:
        said: the values by attribute, for some of `RANK_ATTRIBUTES`.
        names: the group names that were found so far, while an axis still has no group.
            None before there was a world to look in.
        among: the groups that existed at that look-up, see `_groups_here` in
            pickling.py.
    """

    said: dict[str, Any]
    names: list[str] | None = None
    among: tuple[Any, ...] = ()


def wait_for_world(mesh: DeviceMesh) -> SavedAttributes:
    """Set aside what a loaded mesh says about its saver, until there is a default
    group."""
    attributes = mesh.__dict__
    return lay_aside(
        mesh,
        SavedAttributes(
            {name: attributes[name] for name in RANK_ATTRIBUTES if name in attributes}
        ),
    )


def lay_aside(mesh: DeviceMesh, saved: SavedAttributes) -> SavedAttributes:
    """Move the saved attributes from ``__dict__`` into ``_of_saver``; returns
    ``saved``."""
    # First store, then remove: another thread may read an attribute in between.
    mesh.__dict__["_of_saver"] = saved
    for name in saved.said:
        mesh.__dict__.pop(name, None)
    _living[id(mesh)] = mesh  # overlay only
    return saved


def take_back(attributes: dict[str, Any]) -> None:
    """Put back what this rank didn't find for itself, to pickle such a mesh again."""
    saved = attributes.pop("_of_saver", None)
    if saved is not None:
        attributes.update(saved.said)


def axis_names(names: Sequence[str] | None, ndim: int) -> list[str]:
    """A string for each axis; "dim_0" and so on without names: groups are shared by
    name."""
    return (
        [str(name) for name in names]
        if names
        else [f"dim_{number}" for number in range(ndim)]
    )


def copy_mesh(mesh: DeviceMesh, memo: dict[int, Any] | None = None) -> DeviceMesh:
    """A second mesh of the same universe and groups, which sees later flattened views
    too. With the memo of a deep copy, its root mesh and what users set on it are
    copies. A mesh of a subclass is copied as other objects are."""
    if type(mesh) is not device_mesh.DeviceMesh:
        reduced = mesh.__reduce_ex__(4)
        return copy._reconstruct(mesh, memo, *reduced)  # type: ignore[attr-defined]
    copied = make_view(
        mesh, view_of(mesh).layout, mesh._mesh_dim_names, group_names(mesh)
    )
    # The copy computes cached properties, such as `_rank_map`, again on request.
    class_attributes = {
        name for name, value in vars(type(mesh)).items() if not callable(value)
    }
    user_attributes = {
        name: value
        for name, value in mesh.__dict__.items()
        if name not in {*copied.__dict__, *class_attributes}
    }
    root = mesh._root_mesh
    # The copied root may refer back to this mesh, through attributes that users set.
    if memo is not None:
        memo[id(mesh)] = copied
        root, user_attributes = copy.deepcopy((root, user_attributes), memo)
    copied.__dict__.update(user_attributes)
    copied._root_mesh = root
    copied._flatten_mapping = mesh._flatten_mapping
    copied._pg_registry = mesh._pg_registry
    return copied


def make_window(
    parent: DeviceMesh,
    layout: _MeshLayout,
    start: int,
    names: Sequence[str] | None,
    groups: Sequence[str] | None,
) -> DeviceMesh:
    """A root mesh that shows the copy of ``layout`` at index ``start``, without new
    groups."""
    view = view_of(parent).window(layout, start)
    shared = SharedState(view.rank_map, shared_state(parent).private)
    mesh = _new_mesh(parent, None, names)
    put_state(mesh, view, shared)
    mesh._flatten_mapping = shared.flattened
    mesh._pg_registry = shared.registry
    for name in groups or ():
        if name in shared_state(parent).registry:
            shared.registry[name] = shared_state(parent).registry[name]
    return _set_rank_and_groups(mesh, parent, groups)


def is_apart(mesh: DeviceMesh) -> bool:
    """True for a view that has groups of its own, which no other view shares: it was
    flattened or unflattened inside `private_groups` from a mesh that isn't private, or
    has an axis of such a view.

    Its new axes have groups of their own, its other axes keep theirs, and
    redistributions over it use no joint group. The token ``_apart`` marks it.
    """
    return "_apart" in mesh.__dict__


def private_group_key(mesh: DeviceMesh) -> tuple[Any, ...]:
    """Tokens of private groups, in hash and equality, so that caches tell meshes
    apart."""
    return shared_state(mesh).private, mesh.__dict__.get("_apart")


def _new_mesh(
    parent: DeviceMesh, root: DeviceMesh | None, names: Sequence[str] | None
) -> DeviceMesh:
    """A mesh with what doesn't depend on layout, rank or groups. It skips `__init__`,
    which would make groups."""
    mesh: DeviceMesh = object.__new__(device_mesh.DeviceMesh)
    mesh._device_type = parent._device_type
    mesh._mesh_dim_names = tuple(names) if names else None
    mesh._root_mesh = root
    mesh._preserve_rank_order = parent._preserve_rank_order
    mesh._flatten_mapping = {}
    mesh._pg_registry = {}
    mesh._thread_id = getattr(parent, "_thread_id", None)
    mesh._hash = None
    if is_apart(parent):
        mesh.__dict__["_apart"] = parent.__dict__["_apart"]
    return mesh


def _set_rank_and_groups(
    mesh: DeviceMesh, parent: DeviceMesh, groups: Sequence[str] | None
) -> DeviceMesh:
    """Give a view its rank, coordinates and groups; one of a loaded mesh may wait for
    them."""
    rank = getattr(parent, "_rank", None)
    if rank is None and parent._device_type != "xla" and is_initialized():
        rank = get_rank()  # a subclass that skips __init__ may have no _rank
    if rank is not None:
        mesh._rank = rank
        mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
    # Before `_of_saver` is read: for a loaded mesh, this look-up may find its groups
    # and remove `_of_saver`.
    parent_names = group_names(parent) or ()
    saved = parent.__dict__.get("_of_saver")
    # The view of a mesh that still waits for its groups waits, too. So it gets the
    # names that the saver's groups had, in place of those that say that no group was
    # found.
    if groups is not None:
        saved_names = (
            dict(zip(parent_names, saved.said.get("_dim_group_names", ())))
            if saved
            else {}
        )
        mesh._dim_group_names = [saved_names.get(name, name) for name in groups]
    if saved is not None:
        wait_for_world(mesh)
    return mesh


def thread_id() -> int | None:
    """The thread of a mesh under the threaded test backend, whose ranks are threads."""
    return (
        threading.get_ident()
        if is_initialized() and get_backend() == "threaded"
        else None
    )


def hand_back() -> None:  # overlay only
    """Turn every living mesh back into what code without this state expects."""
    for mesh in list(_living.values()):
        attributes = mesh.__dict__
        take_back(attributes)
        if "_in_universe" not in attributes:
            continue
        shared = attributes.pop("_in_universe").shared
        attributes["_universe"] = saved_universe(shared)
        attributes.pop("_apart", None)
        attributes.pop("_whose_groups", None)  # only a loaded mesh has it
        attributes.pop("_traced_views", None)
        attributes.setdefault("_rank_map", shared.tensor)
        attributes.setdefault("_flatten_rank_map", shared.ranks)
    _living.clear()


def saved_universe(shared: SharedState) -> tuple[int | None, str | None]:
    """The universe's number and private token, which a pickle stores to find its
    groups."""
    return (
        shared.universe.number if shared.universe else shared.saved_number,
        shared.private,
    )


def read_view(mesh: Any, layout: Any, rank_map: Any) -> View:
    """The view for the arguments of DeviceMesh: ``mesh``, or ``_layout``,
    ``_rank_map``."""
    if layout is None and rank_map is None:
        return read_mesh(mesh)
    return read_layout(mesh, layout, rank_map)


def read_mesh(mesh: Any) -> View:
    """The view for ranks in a tensor, array or nested list of any shape."""
    if mesh is None:
        raise TypeError("The mesh argument is required except for PRIVATE USAGE ONLY!")
    if isinstance(mesh, torch.Tensor) and mesh.is_meta:
        raise ValueError(
            "A mesh needs ranks, and a tensor on the meta device holds none, got "
            f"{tuple(mesh.shape)}"
        )
    # Ranks are read as numbers, so the tensor must be real under any mode.
    with _disable_current_modes():
        given = (
            mesh.detach()
            if isinstance(mesh, torch.Tensor)
            else torch.tensor(mesh, device="cpu")
        )
        ranks = given.to(device="cpu", dtype=torch.int)
        if given.numel() == 0:
            raise ValueError(
                "A mesh needs at least one rank on each axis, got a mesh of shape "
                f"{tuple(given.shape)}"
            )
        given_ranks, int_ranks = given.flatten().tolist(), ranks.flatten().tolist()
        # 1.5, or 2**40, would silently become another rank.
        if given_ranks != int_ranks:
            wrong = next(
                rank
                for rank, kept in zip(given_ranks, int_ranks, strict=True)
                if rank != kept
            )
            raise ValueError(
                f"A mesh needs whole ranks from 0 to {torch.iinfo(torch.int).max}, "
                f"got rank {wrong}"
            )
        return View(
            RankMap(int_ranks), _MeshLayout.from_sizes_strides(tuple(ranks.shape))
        )


def read_layout(mesh: Any, layout: Any, rank_map: Any) -> View:
    if mesh is not None:
        raise TypeError(
            "Cannot provide _layout and/or _rank_map if passing explicit mesh"
        )
    if layout is None or rank_map is None:
        raise TypeError("The mesh argument is required except for PRIVATE USAGE ONLY!")
    if isinstance(rank_map, RankMap):
        return View(rank_map, layout)
    axes = from_torch(layout)
    if not axes.collapse().check_orthogonal():
        raise AssertionError(
            "Please use a non-overlapping layout when creating a DeviceMesh."
        )
    if rank_map.ndim != 1:
        raise AssertionError("The rank map must be 1-dimensional")
    if not rank_map.is_contiguous():
        raise AssertionError("The rank map must be contiguous")
    if rank_map.numel() < axes.cosize():
        raise AssertionError(
            f"The rank map contains {rank_map.numel()} element, which isn't large "
            f"enough for layout {layout}"
        )
    return View(RankMap(rank_map.tolist()), axes)


def check_in_world(rank_map: RankMap) -> None:
    world_size = get_world_size()
    # The usual case, without a loop over all ranks.
    if rank_map.is_identity and rank_map.numel <= world_size:
        return
    for rank in rank_map.ranks():
        if not 0 <= rank < world_size:
            raise ValueError(
                f"Rank {rank} is out of range. Valid ranks are 0 to {world_size - 1} "
                f"(world_size={world_size})"
            )
