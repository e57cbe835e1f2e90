"""What a DeviceMesh carries: its view, and the state that all meshes of one universe
share, the root, its slices, its flattened and unflattened views.

A view keeps a reference to the state and nothing else that grows with the world. What
others read off a mesh, the rank map as a tensor and as a tuple, is made here on the
first request, once.

Meshes come from three places: made here, made by code that knew of no state, and loaded
from a file. The last two hold the attributes without a state, and get it on first use.
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
    """The name of this rank's group on each axis; none on a rank outside. None for a
    mesh that was made without groups.

    It is the mesh's own list, not a copy.
    """
    return getattr(mesh, "_dim_group_names", None)


# Of the meshes that live: what `status()` counts, and what `forget_answers` clears.
states: weakref.WeakSet[SharedState] = weakref.WeakSet()  # overlay only


class TracedViews:
    """The views that compiled code made, each an attribute, which dynamo looks up each
    time it is read; of a dict it would take what is in it at the first read in a
    graph."""


@dataclass
class Remembered:
    """What redistributions over the meshes of a universe found out.

    Attributes:
        at_hand: the groups at hand of each site, see tensor/_runner/at_hand.py.
        answers: to questions, each made once, see tensor/_runner/answers.py.
        specs: the attributes of the specs in which redistributions end, but for the
            mesh.
    """

    at_hand: dict[Any, Any] = field(default_factory=dict)
    answers: dict[Any, Any] = field(default_factory=dict)
    specs: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)


class SharedState:
    """One for a root mesh and all its views, a mesh universe.

    Attributes:
        rank_map: index to rank and back.
        flattened: the flattened views by name, the mesh's ``_flatten_mapping``; others
            may write it.
        registry: the groups by name, the mesh's ``_pg_registry``.
        private: what tells a private universe from its equals, a part of its meshes'
            value; None if it isn't private.
        universe: its groups in this world; None before the first request, see
            `universe_of`.
        traced: the views that compiled code made.
        saved_number: of a loaded mesh, which universe over these ranks it was saved
            from.
        remembered: what redistributions over its meshes found out; freed with the last
            mesh of the universe.
    """

    def __init__(self, rank_map: RankMap, private: str | None = None) -> None:
        self.rank_map = rank_map
        self.flattened: dict[str, DeviceMesh] = {}
        self.registry: dict[str, ProcessGroup] = {}
        self.private = private
        self.universe: Universe | None = None
        self.saved_number: int | None = None
        self.remembered = Remembered()
        states.add(self)  # overlay only
        self.traced = TracedViews()
        self._tensor: torch.Tensor | None = None
        self._ranks: tuple[int, ...] | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The rank map as ``_rank_map`` has it: one dimension, int32, on the CPU."""
        if self._tensor is None:
            # A real tensor, whatever mode (fake, meta, proxy, inference) is active
            # around the caller.
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
        """The ranks of the copy of ``layout`` that starts at index ``start``, in its
        shape.

        A view, and so as quick for a million ranks as for eight, unless an axis has
        several modes, which no single stride can express; then `reshape` copies.
        """
        shape = [size for axis in layout.axes for size in axis.shape]
        stride = [step for axis in layout.axes for step in axis.stride]
        return self.tensor.as_strided(shape, stride, start).reshape(
            layout.top_level_sizes
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank map as ``_flatten_rank_map`` has it."""
        if self._ranks is None:
            self._ranks = tuple(self.rank_map.ranks())
        return self._ranks


_adopting = threading.RLock()  # one state for a mesh, whichever thread asks first

# Every mesh that lacks what torch's own code would look for, by id. Weak: a mesh lives
# no longer for being listed.
_living: Any = weakref.WeakValueDictionary()  # overlay only


class InUniverse(NamedTuple):
    """What a mesh holds as ``_in_universe``; one that doesn't gets it when it is first
    asked for.

    Attributes:
        view: its view over the rank map of its universe.
        shared: what it has in common with its root and all the root's views.
    """

    view: View
    shared: SharedState


def view_of(mesh: DeviceMesh) -> View:
    """The mesh's view over its universe's rank map."""
    held = mesh.__dict__.get("_in_universe")
    return (_adopt(mesh) if held is None else held).view


def shared_state(mesh: DeviceMesh) -> SharedState:
    """What the mesh has in common with its root and all the root's views."""
    held = mesh.__dict__.get("_in_universe")
    return (_adopt(mesh) if held is None else held).shared


def state_over(rank_map: RankMap, root: SharedState | None) -> SharedState:
    """The state of a mesh over these ranks: its root's if that is over the same, else a
    new one.

    The new one has the root's registry, in which get_group and compiled code look for
    the groups of a view.
    """
    if root is not None and root.rank_map == rank_map:
        return root
    shared = SharedState(rank_map)
    if root is not None:
        shared.registry = root.registry
    return shared


def join_state(mesh: DeviceMesh, view: View, root: DeviceMesh | None) -> SharedState:
    """Give a new mesh over these ranks its state, that of its root if it can be."""
    shared = state_over(view.rank_map, None if root is None else shared_state(root))
    # the root's rank map, not an equal one
    put_state(mesh, View(shared.rank_map, view.layout), shared)
    return shared


def put_state(mesh: DeviceMesh, view: View, shared: SharedState) -> None:
    """Give a mesh its state, and its layout as an attribute."""
    mesh._layout = to_torch(view.layout)
    mesh.__dict__["_in_universe"] = InUniverse(view, shared)
    _forget_coordinates(mesh)  # overlay only
    _living[id(mesh)] = mesh  # overlay only


def _forget_coordinates(mesh: DeviceMesh) -> None:  # overlay only
    """Drop what LocalTensorMode holds for the id of a new mesh.

    Before 2.14 it keeps every rank's coordinates by the id of the mesh. A slice that
    nobody holds is gone at once, since meshes made here are in no reference cycle, and
    the next slice often has its id.
    """
    local_tensor = sys.modules.get("torch.distributed._local_tensor")
    for mode in (
        local_tensor.get_local_tensor_mode_list() if local_tensor is not None else ()
    ):
        getattr(mode, "_coordinate_cache", {}).pop(id(mesh), None)


def _adopt(mesh: DeviceMesh) -> InUniverse:
    """Read the state off a mesh that holds only what DeviceMesh stores, or that
    forwards to another mesh."""
    with _adopting:
        if "_in_universe" not in mesh.__dict__:
            lent = _lent_state(mesh)
            if lent is not None:
                return lent
            _read_state(mesh)
        return mesh.__dict__["_in_universe"]


def _lent_state(mesh: DeviceMesh) -> InUniverse | None:
    """The state of the mesh to which this one forwards by `__getattr__`; None if it
    forwards to none that has one.

    It isn't kept: a class that builds its mesh late, or again after a failure, forwards
    to another mesh then.
    """
    forward = getattr(type(mesh), "__getattr__", None)
    if "_layout" in mesh.__dict__ or forward is None:
        return None
    try:
        forward(mesh, "_hash_key")()  # one that was never asked reads its state here
        lent = forward(mesh, "_in_universe")
    except AttributeError:
        return None
    return lent if isinstance(lent, InUniverse) else None


_STORED = (
    "_layout",
    "_rank_map",
    "_flatten_rank_map",
    "_root_mesh",
    "_flatten_mapping",
    "_pg_registry",
)


def _stored(mesh: DeviceMesh) -> dict[str, Any]:
    """The attributes that a mesh holds: its own dict, or a copy of it with those that
    `__getattr__` answers for. Our class attributes of the same names must not be asked:
    they would ask for the state that is to be read."""
    held, forward = mesh.__dict__, getattr(type(mesh), "__getattr__", None)
    if "_layout" in held or forward is None:
        return held
    found = dict(held)
    for name in _STORED:
        with contextlib.suppress(AttributeError):
            found.setdefault(name, forward(mesh, name))
    return found


def stored_ranks(held: dict[str, Any]) -> RankMap:
    """The ranks in the attributes of a mesh: of a subclass that makes its own, and of
    one from an older file, they may lack the tuple. Raises AttributeError where there
    are none, as in a mesh whose constructor hasn't run."""
    if "_flatten_rank_map" in held:
        return RankMap(held["_flatten_rank_map"])
    if "_rank_map" in held:
        return RankMap(held["_rank_map"].tolist())
    raise AttributeError(
        "this DeviceMesh has no ranks yet: neither its constructor nor __setstate__() "
        "has run"
    )


def _holds_ranks_of(held: dict[str, Any], root: Any) -> bool:
    """Whether a mesh holds no ranks but its root's; one made with the private
    ``_root_mesh`` may hold others."""
    stored = [name for name in ("_rank_map", "_flatten_rank_map") if name in held]
    # Views made or loaded with their root hold the same objects; so no ranks are read.
    return not stored or any(held[name] is root.__dict__.get(name) for name in stored)


def _read_state(mesh: DeviceMesh) -> None:
    held = _stored(mesh)
    root = getattr(mesh, "_root_mesh", None)
    # of a loaded mesh, see `saved_state`
    number, private = held.pop("_universe", (None, None))
    registry = held.setdefault("_pg_registry", {})
    theirs = None if root is None or root is mesh else shared_state(root)
    rank_map = (
        theirs.rank_map
        if theirs is not None and _holds_ranks_of(held, root)
        else stored_ranks(held)
    )
    shared = state_over(rank_map, theirs)
    if shared is not theirs:
        shared.private = private
        shared.saved_number = number
        join_universe(shared)
    if theirs is None:
        shared.flattened = held.setdefault("_flatten_mapping", {})
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
    """Another mesh over the ranks of ``parent``'s universe.

    Args:
        layout: over the universe's rank map.
        names: of the axes; None for none.
        groups: the name of this rank's group on each axis; empty on a rank outside,
            None where no backend was set up.
    """
    root = parent._get_root_mesh()
    mesh = _blank(parent, root, names)
    put_state(mesh, view_of(parent).show(layout), shared_state(parent))
    return _finish(mesh, parent, groups)


# What a mesh says of this rank.
RANK_ATTRIBUTES = ("_rank", "_coordinate_on_dim", "_dim_group_names")


@dataclass(frozen=True)
class OfSaver:
    """What a file says of the rank that saved the mesh, where it isn't taken for what
    is so of this one.

    Attributes:
        said: by attribute, some of `RANK_ATTRIBUTES`.
        names: what was found on each axis while an axis has no group; None before a
            world was asked.
        among: the groups that there were then, see pickling.py.
    """

    said: dict[str, Any]
    names: list[str] | None = None
    among: tuple[Any, ...] = ()


def wait_for_world(mesh: DeviceMesh) -> OfSaver:
    """Lay aside what a mesh that was loaded says of a rank: it is the saver's."""
    held = mesh.__dict__
    return lay_aside(
        mesh, OfSaver({name: held[name] for name in RANK_ATTRIBUTES if name in held})
    )


def lay_aside(mesh: DeviceMesh, saver: OfSaver) -> OfSaver:
    """Hold what the saver said apart from what the mesh says; another thread may ask in
    between."""
    mesh.__dict__["_of_saver"] = saver
    for name in saver.said:
        mesh.__dict__.pop(name, None)
    _living[id(mesh)] = mesh  # overlay only
    return saver


def take_back(held: dict[str, Any]) -> None:
    """Let the attributes of a mesh say again what its saver said, where nothing else
    was found."""
    saver = held.pop("_of_saver", None)
    if saver is not None:
        held.update(saver.said)


def axis_names(names: Sequence[str] | None, ndim: int) -> list[str]:
    """What the axes of a mesh are called, of one without names as well; groups are told
    apart by it."""
    return (
        [str(name) for name in names]
        if names
        else [f"dim_{number}" for number in range(ndim)]
    )


def copy_mesh(mesh: DeviceMesh, memo: dict[int, Any] | None = None) -> DeviceMesh:
    """Another mesh of the same universe: views flattened later, and groups, are seen by
    both. With the memo of a deep copy its root, and what users put on it, are copies,
    too. One of a subclass is copied as other objects are."""
    if type(mesh) is not device_mesh.DeviceMesh:
        reduced = mesh.__reduce_ex__(4)
        return copy._reconstruct(mesh, memo, *reduced)  # type: ignore[attr-defined]
    copied = make_view(
        mesh, view_of(mesh).layout, mesh._mesh_dim_names, group_names(mesh)
    )
    # on request, as `_rank_map`
    made = {name for name, value in vars(type(mesh)).items() if not callable(value)}
    users = {
        name: value
        for name, value in mesh.__dict__.items()
        if name not in {*copied.__dict__, *made}
    }
    root = mesh._root_mesh
    if memo is not None:
        memo[id(mesh)] = copied
        root, users = copy.deepcopy((root, users), memo)
    copied.__dict__.update(users)
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
    """The copy of ``layout`` at index ``start``, as a root of its own."""
    view = view_of(parent).window(layout, start)
    shared = SharedState(view.rank_map, shared_state(parent).private)
    mesh = _blank(parent, None, names)
    put_state(mesh, view, shared)
    mesh._flatten_mapping = shared.flattened
    mesh._pg_registry = shared.registry
    for name in groups or ():
        if name in shared_state(parent).registry:
            shared.registry[name] = shared_state(parent).registry[name]
    return _finish(mesh, parent, groups)


def is_apart(mesh: DeviceMesh) -> bool:
    """Whether it is a view with new axes of a mesh that isn't private, made in a block
    of `private_groups`, or has an axis of such a view. Its token tells it from other
    views.

    The new axes have groups of their own, the others those that they had. Plans share
    none over several axes.
    """
    return "_apart" in mesh.__dict__


def whose_groups(mesh: DeviceMesh) -> tuple[Any, ...]:
    """What tells a mesh from its equals with other groups, which must not stand for it
    where meshes are kept."""
    return shared_state(mesh).private, mesh.__dict__.get("_apart")


def _blank(
    parent: DeviceMesh, root: DeviceMesh | None, names: Sequence[str] | None
) -> DeviceMesh:
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


def _finish(
    mesh: DeviceMesh, parent: DeviceMesh, groups: Sequence[str] | None
) -> DeviceMesh:
    rank = getattr(parent, "_rank", None)
    if rank is None and parent._device_type != "xla" and is_initialized():
        rank = get_rank()  # a subclass that makes its own mesh may not say
    if rank is not None:
        mesh._rank = rank
        mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
    held = group_names(parent) or ()  # first: a loaded mesh may find its groups here
    saver = parent.__dict__.get("_of_saver")
    if groups is not None:
        theirs = (
            dict(zip(held, saver.said.get("_dim_group_names", ()))) if saver else {}
        )
        mesh._dim_group_names = [theirs.get(name, name) for name in groups]
    if saver is not None:
        wait_for_world(mesh)
    return mesh


def thread_id() -> int | None:
    """Meshes of the threaded test backend belong to their thread."""
    return (
        threading.get_ident()
        if is_initialized() and get_backend() == "threaded"
        else None
    )


def hand_back() -> None:  # overlay only
    """Give every living mesh what torch's own code looks for, and take the overlay's
    state off it."""
    for mesh in list(_living.values()):
        held = mesh.__dict__
        take_back(held)
        if "_in_universe" not in held:
            continue
        shared = held.pop("_in_universe").shared
        held["_universe"] = saved_universe(shared)
        held.pop("_apart", None)
        held.pop("_whose_groups", None)  # of one that was loaded
        held.pop("_traced_views", None)
        held.setdefault("_rank_map", shared.tensor)
        held.setdefault("_flatten_rank_map", shared.ranks)
    _living.clear()


def saved_universe(shared: SharedState) -> tuple[int | None, str | None]:
    """Which universe over its ranks a mesh is of, by its number and what makes it
    private, for who can't hold the state: a pickle finds its groups again by it."""
    return (
        shared.universe.number if shared.universe else shared.saved_number,
        shared.private,
    )


def read_view(mesh: Any, layout: Any, rank_map: Any) -> View:
    """What DeviceMesh is given: ranks, see `read_mesh`, or the private arguments
    instead, see `read_layout`."""
    if layout is None and rank_map is None:
        return read_mesh(mesh)
    return read_layout(mesh, layout, rank_map)


def read_mesh(mesh: Any) -> View:
    """Ranks as a tensor, array or nested list, of any shape.

    Raises:
        TypeError: nothing given, or nothing that can be ranks.
        ValueError: no rank at all, a rank that isn't a whole number, doesn't fit in
            int32, or stands there twice.
    """
    if mesh is None:
        raise TypeError("The mesh argument is required except for PRIVATE USAGE ONLY!")
    if isinstance(mesh, torch.Tensor) and mesh.is_meta:
        raise ValueError(
            "A mesh needs ranks, and a tensor on the meta device holds none, got "
            f"{tuple(mesh.shape)}"
        )
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
        asked, stored = given.flatten().tolist(), ranks.flatten().tolist()
        if asked != stored:
            wrong = next(
                rank for rank, kept in zip(asked, stored, strict=True) if rank != kept
            )
            raise ValueError(
                f"A mesh needs whole ranks from 0 to {torch.iinfo(torch.int).max}, "
                f"got rank {wrong}"
            )
        return View(RankMap(stored), _MeshLayout.from_sizes_strides(tuple(ranks.shape)))


def read_layout(mesh: Any, layout: Any, rank_map: Any) -> View:
    """The private arguments: a layout and the rank map, as a tensor or, at no cost, as
    a RankMap.

    Raises:
        TypeError: a mesh besides, or only one of the two.
        AssertionError: overlapping axes, or a rank map that doesn't fit; a RankMap
            isn't looked at.
    """
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
    """Raise ValueError for a rank that the world doesn't have."""
    world_size = get_world_size()
    if rank_map.is_identity and rank_map.numel <= world_size:
        return
    for rank in rank_map.ranks():
        if not 0 <= rank < world_size:
            raise ValueError(
                f"Rank {rank} is out of range. Valid ranks are 0 to {world_size - 1} "
                f"(world_size={world_size})"
            )
