"""Universes: a root mesh and all its views, the unit in which process groups are shared.

``mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))`` opens one, with ``mesh["tp"]`` and
``mesh._flatten()`` in it. The same call again opens another, and the two share nothing.

What is kept here outlives the meshes, as groups do, and ends with the world (the default process group).
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
import warnings
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed import distributed_c10d

from .settings import members_create
from .table import GroupTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.distributed_c10d import ProcessGroup

    from .._mesh.input import Override
    from .._mesh.rank_map import RankMap
    from .._mesh_layout import _FlatLayout
    from .table import Kind

_lock = threading.RLock()
_serials = itertools.count(1)

# On in a block of `private_groups`.
making_private: contextvars.ContextVar[bool] = contextvars.ContextVar("making_private", default=False)
_blocks: list[str] = []  # the names of the threads that are in one


@contextlib.contextmanager
def private_groups() -> Iterator[None]:
    """Give the meshes that are made inside groups that no other mesh shares, for one block of code. A mesh of
    `from_group` has the groups that it is given, and isn't private.

    Privacy belongs to the universe: views of such a mesh that are made later, copies and pickles keep it, and
    redistributions over them use no group from outside, not even the default one. A view with new axes, made inside of
    a mesh from outside, gets groups of its own for these.

    Inside is the code of the block and what has its context: tasks of asyncio that it starts, and `asyncio.to_thread`.
    Other threads aren't, be they started in the block or before: nothing tells which of them work for it. One that
    makes a mesh meanwhile is warned that this one isn't private. As a decorator it goes into any thread:

    >>> with private_groups():  # doctest: +SKIP
    ...     second = init_device_mesh("cpu", (8,))  # its all-gathers run beside those of the first mesh
    >>> pool.submit(private_groups()(init_device_mesh), "cpu", (8,))  # doctest: +SKIP
    """
    holder = threading.current_thread().name
    _blocks.append(holder)
    try:
        with made_private():
            yield
    finally:
        _blocks.remove(holder)


@contextlib.contextmanager
def made_private() -> Iterator[None]:
    """The same for groups that are made here and now, whoever else makes some."""
    token = making_private.set(True)
    try:
        yield
    finally:
        making_private.reset(token)


def warn_outside_of_blocks() -> None:
    """Say that a mesh which isn't private is made while another thread, or another task, is in a block."""
    holders = list(_blocks)
    if holders and not making_private.get():
        warnings.warn(
            f"A mesh made here, in thread {threading.current_thread().name}, isn't private, though private_groups() is "
            f"open in thread {holders[-1]}: a block doesn't reach into other threads. If the mesh is to be private, "
            "open the block where it is made, as in pool.submit(private_groups()(build)). If not, all is well.",
            stacklevel=2,
        )


class Universe:
    """What a root mesh and all its views have in common of groups.

    Attributes:
        rank_map: of the root.
        number: counts the universes over this rank map in this world, the same on all its ranks.
        private: what tells a private universe from its equals; None if it isn't private.
        table: the groups that were made for its axes.
        joint: the names of the groups over several axes together, by the indices that they hold and what they can do;
            empty names on ranks outside.
        overrides: the backend and options that were given, by the name of the group that was made with them; on a
            rank outside by the name of the axis and its layout.
        serial: differs from every other universe of this process.
        version: counts the changes of `joint`; with `serial`, for whoever remembers what is there.
    """

    def __init__(self, world: World, rank_map: RankMap, number: int, private: str | None) -> None:
        self.world = world
        self.rank_map = rank_map
        self.number = number
        self.private = private
        self.table = GroupTable()
        self.joint: dict[tuple[_FlatLayout, Kind], str] = {}
        # Of these, those that their owner asked for by `prepare`, instead of the option `flatten`.
        self.asked_for: set[tuple[_FlatLayout, Kind]] = set()  # overlay only
        self.overrides: dict[str | tuple[str, _FlatLayout], Override] = {}
        # The axes that the default group serves, for `status()`.
        self.by_default: dict[str, None] = {}  # overlay only
        self.serial = next(_serials)
        self.version = 0
        self.held: weakref.WeakSet[Holder] = weakref.WeakSet()  # by meshes, as their state


class Holder(Protocol):
    """The shared state of a mesh, as far as a universe needs it."""

    rank_map: RankMap
    private: str | None
    universe: Universe | None
    saved_number: int | None


class World:
    """What meshes left behind in one world, the same on every rank that made the same calls.

    Attributes:
        universes: in the order in which they were opened; a pickle may name each.
        left: those of which a mesh is gone in this process, and that `_close_left` may still close.
        compared: how many times ranks compared meshes (see `check_same_mesh`).
        left_before: how often ranks gave up comparing in earlier worlds on the same store.
        line: what this rank said last of a mesh that it is about to build (see `leave_line`).
        lines: how often it said what.
    """

    def __init__(self) -> None:
        self.universes: list[Universe] = []
        self.left: dict[Universe, None] = {}
        self.compared, self.left_before = 0, 0
        self.line: str | None = None
        self.lines: Counter[str] = Counter()
        self._private: Counter[RankMap] = Counter()
        self._opened: Counter[RankMap] = Counter()

    def open_universe(self, rank_map: RankMap, private: str | None = None) -> Universe:
        """One more universe over these ranks."""
        with _lock:
            _close_left(self)
            self._opened[rank_map] += 1
            self.universes.append(Universe(self, rank_map, self._opened[rank_map], private))
            return self.universes[-1]

    def next_private(self, rank_map: RankMap) -> str:
        """What tells the next private universe over these ranks from any other, the same on all of them.

        It names the ranks, since a window of a private mesh keeps it, beside private meshes over the window's ranks.
        """
        self._private[rank_map] += 1
        return f"private {self._private[rank_map]} over {rank_map.key}"


_worlds: weakref.WeakKeyDictionary[ProcessGroup, World] = weakref.WeakKeyDictionary()


def current_world() -> World:
    """The world that this thread is in now. Raises ValueError if there is none."""
    group = distributed_c10d._get_default_group()
    world = _worlds.get(group)
    if world is not None:
        return world
    with _lock:
        if group not in _worlds:
            _worlds[group] = World()
        return _worlds[group]


def find_universe(rank_map: RankMap, private: str | None, number: int | None) -> Universe | None:
    """The universe of this number over these ranks, else the first; None if none is here that is as private."""
    universes = current_world().universes
    alike = [known for known in universes if (known.rank_map, known.private) == (rank_map, private)]
    return next((known for known in alike if known.number == number), alike[0] if alike else None)


def join_universe(shared: Holder) -> None:
    """Let a loaded mesh have the groups of the universe that it was saved from, else of the first that is alike."""
    if shared.universe is None and shared.saved_number is not None and distributed_c10d.is_initialized():
        shared.universe = find_universe(shared.rank_map, shared.private, shared.saved_number)
        if shared.universe is not None:
            _leave_with(shared, shared.universe)


def universe_of(shared: Holder) -> Universe:
    """The universe of a mesh in this world, opened at the first request for a group."""
    world = current_world()
    join_universe(shared)
    if shared.universe is None or shared.universe.world is not world:
        shared.universe = world.open_universe(shared.rank_map, shared.private)
        _leave_with(shared, shared.universe)
    return shared.universe


def _leave_with(shared: Holder, universe: Universe) -> None:
    """Note that a mesh of a universe is gone, once it is; `_close_left` sees whether others are left."""
    universe.held.add(shared)
    noted: Any = weakref.finalize(shared, universe.world.left.setdefault, universe)
    noted.atexit = False


def _close_left(world: World) -> None:
    """Destroy the joint groups of universes that no mesh is left of, for which their owner has no name. This rank must
    have destroyed every group of an axis; until then it is asked again before each next universe.

    Not where every rank of the world makes each group: who loads a mesh of such a universe later may need a joint group
    again, and ranks outside don't know that it is gone.
    """
    alone = members_create(distributed_c10d._get_default_group(), None)
    for universe in list(world.left):
        del world.left[universe]  # a mesh that goes from here on puts it back
        entries = universe.table.entries.values()
        axes = [entry for entry in entries if entry.group_name and entry.serves_axis]
        joint = [entry.group for entry in entries if entry.group is not None and not entry.serves_axis]
        # On other backends all ranks may have to end a communicator together.
        local = {*map(distributed_c10d.get_backend, joint)} <= {"gloo", "fake"}
        if universe.held or not (alone and local and axes and joint):
            continue
        if any(entry.group is not None for entry in axes):
            world.left[universe] = None
            continue
        universe.joint.clear()
        universe.version += 1
        for group in joint:
            distributed_c10d.destroy_process_group(group)
