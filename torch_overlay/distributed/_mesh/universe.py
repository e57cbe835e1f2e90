"""The process groups of a mesh and of all its views, as values: which settings hold,
which key finds which group.

A universe is a root mesh with its views, the unit in which groups are shared. ``mesh =
init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))`` opens one, with
``mesh["tp"]`` and ``mesh._flatten()`` in it. The same call again opens another, and the
two share nothing. Groups that the user made with ``dist.new_group`` never enter one.

Whether a request finds its group depends on its key and on the requests before it,
which every member of the group knows alike. So either all members find the group, or
all of them make it (groups.py).

What is kept here outlives the meshes, as groups do, and ends with the world (the
default process group).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import threading
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from torch.distributed import distributed_c10d

from .. import config
from .text import axes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.distributed_c10d import GroupName, ProcessGroup

    from .._mesh_layout import _FlatLayout
    from .arguments import Override
    from .rank_map import RankMap


class Settings(NamedTuple):
    """What a user may choose about groups and redistributions, by the names in
    torch.distributed.config."""

    mesh_share_groups: str
    mesh_create_groups: str
    mesh_joint_groups: str
    mesh_check: bool
    plan_redistribution: bool


_WORDS = {
    "mesh_share_groups": ("names", "ranks", "off"),
    "mesh_create_groups": ("members", "world"),
    "mesh_joint_groups": ("existing", "whole"),
}


def get_settings() -> Settings:
    """The choices in force now; ask again at each use, since they change while meshes
    live.

    Raises:
        ValueError: a choice that isn't one; names it, and what it takes.
    """
    return _checked(*[getattr(config, name) for name in Settings._fields])


@functools.lru_cache(maxsize=64)
def _checked(*values: object) -> Settings:
    settings = Settings(*values)  # type: ignore[arg-type]
    for name, words in _WORDS.items():
        value = getattr(settings, name)
        if value not in words:
            raise ValueError(
                f"torch.distributed.config.{name} is one of {', '.join(words)}, got "
                f"{value!r}"
            )
    return settings


def members_create(world: ProcessGroup, backend: str | None) -> bool:
    """Whether the members of a group can make it without the others.

    MPI can't; a device-bound NCCL world splits, in which all ranks take part;
    torchcomms has its own way. With it, the members make groups of the fake backend,
    whatever is chosen.
    """
    asked = (backend or distributed_c10d.get_backend(world)).lower()
    if config.use_torchcomms and backend == "fake":
        return True  # compiled code can't resolve numbered names beside those of splits
    return (
        get_settings().mesh_create_groups == "members"
        and not makes_communicators(world)
        and "mpi" not in asked
    )


def makes_communicators(world: ProcessGroup) -> bool:
    """Whether a group has its communicator, and the memory of one, from the moment it
    is made."""
    return world.bound_device_id is not None or config.use_torchcomms


class Key(NamedTuple):
    """What must be equal for two requests to get one group.

    On a 2 x 4 mesh of axes dp and tp, rank 5 asks for its group of tp with ranks
    ``range(4, 8)``, named ``"tp"``.

    Attributes:
        ranks: in the order of the mesh; see `compact`.
        kind: the backend and options.
        name: who shares: the axes and flattened views of this name; None: all, whatever
            their names.
        number: above 0 for a group that nobody else gets, however equal the rest.
    """

    ranks: tuple[int, ...] | range
    kind: Kind
    name: str | None
    number: int = 0


@dataclass
class Entry:
    """A group that was made.

    Attributes:
        group_name: by which c10d finds it; empty on a rank that isn't in it.
        names: of the axes that it serves, in the order in which they asked.
        serves_axis: whether an axis asked for it, or only redistributions over several.
        apart: the token of the view of `is_apart` that has the group alone, empty until
            the view is made; else None.
    """

    group_name: str
    names: list[str] = field(default_factory=list)
    serves_axis: bool = False
    apart: str | None = None

    @property
    def group(self) -> ProcessGroup | None:
        """The group, or None if this rank isn't in it or the group was destroyed."""
        return find_group(self.group_name) if self.group_name else None


class GroupTable:
    """Groups by their keys. Holds names, not groups, so that a group that was destroyed
    is freed."""

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = {}

    def get_or_make(
        self,
        keys: Sequence[Key],
        make: Callable[[list[list[int]]], Sequence[ProcessGroup | None]],
    ) -> list[Entry]:
        """The entries of groups: found if they were made before, else made now, all
        that are missing together.

        Raises:
            RuntimeError: this rank's group was made and is gone. Ranks that aren't in
                it can't know, so it can't be made again: they would not take part.
        """
        missing = [key for key in keys if key not in self.entries]
        if missing:
            groups = make([list(key.ranks) for key in missing])
            self.entries |= {
                key: Entry(group.group_name if group else "")
                for key, group in zip(missing, groups)
            }
        found = [self.entries[key] for key in keys]
        for key, entry in zip(keys, found):
            if entry.group_name and entry.group is None:
                raise RuntimeError(
                    f"The process group of {axes_text(entry.names)} over ranks "
                    f"{list(key.ranks)} was destroyed here, "
                    "and other ranks that must take part in making it again don't "
                    "know. Build a new mesh with "
                    "init_device_mesh; its groups are new."
                )
        return found

    def forget_gone(self, key: Key) -> None:
        """Forget a group that was destroyed, where its members alone make it: they
        destroyed it together, as all must, so all of them forget it."""
        entry = self.entries.get(key)
        if entry is not None and entry.group_name and entry.group is None:
            del self.entries[key]

    def next_number(self, key: Key) -> Key:
        """The key of another group of this kind, which nobody else gets."""
        number = 1
        while key._replace(number=number) in self.entries:
            number += 1
        return key._replace(number=number)


def find_group(group_name: str) -> ProcessGroup | None:
    """The group of this name in this process, or None; names aren't used again within a
    world."""
    try:
        return distributed_c10d._resolve_process_group(cast("GroupName", group_name))
    except RuntimeError:
        return None


# What a backend writes into an options object when it makes a group, and so no part of
# what the user chose.
_WRITTEN_BY_CREATORS = {
    "global_ranks_in_group",
    "group_name",
    "split_from",
    "split_color",
    "enable_reconfigure",
}


class Kind(NamedTuple):
    """The backend of a group, and the options it was made with, by value."""

    backend: str
    options: Any

    @classmethod
    def of(cls, override: Override) -> Kind:
        """The kind that a backend and options ask for; without a backend, the default
        group's."""
        backend, options = override
        default = distributed_c10d._get_default_group()
        return cls(
            (backend or distributed_c10d.get_backend(default)).lower(),
            _by_value(options),
        )


class _Unlike:
    """Stands for options that can't be compared: equal to the same object only, which
    it keeps alive."""

    def __init__(self, options: Any) -> None:
        self.options = options

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unlike) and other.options is self.options

    def __hash__(self) -> int:
        return id(self.options)


def _by_value(options: Any) -> Any:
    """Options by value: their fields as they are before a backend writes into them."""
    if options is None:
        return None
    names = [name for name in _fields(options) if name not in _WRITTEN_BY_CREATORS]
    try:
        return (
            type(options).__name__,
            tuple((name, _plain(getattr(options, name, None))) for name in names),
        )
    except TypeError:
        return _Unlike(options)


def _fields(value: Any) -> list[str]:
    """The attributes of an object, public or not, without the methods of its class."""
    names = [name for name in dir(value) if not name.startswith(("__", "_pybind"))]
    return [name for name in names if not callable(getattr(type(value), name, None))]


def _plain(value: Any) -> Any:
    """A value that says all of `value`. Raises TypeError if there is no telling."""
    if value is None or isinstance(value, (bool, int, float, str, timedelta)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if type(value).__name__ == "NCCLConfig":
        return tuple((name, _plain(getattr(value, name))) for name in _fields(value))
    raise TypeError(value)


_lock = threading.RLock()
_serials = itertools.count(1)

# On in a block of `private_groups`.
making_private: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "making_private", default=False
)
_blocks: list[str] = []  # the names of the threads that are in one


@contextlib.contextmanager
def private_groups() -> Iterator[None]:
    """Give the meshes that are made inside groups that no other mesh shares, for one
    block of code. A mesh of `from_group` has the groups that it is given, and isn't
    private.

    Privacy belongs to the universe: views of such a mesh that are made later, copies
    and pickles keep it, and redistributions over them use no group from outside, not
    even the default one. A view with new axes, made inside of a mesh from outside, gets
    groups of its own for these.

    Inside is the code of the block and what has its context: tasks of asyncio that it
    starts, and `asyncio.to_thread`. Other threads aren't, be they started in the block
    or before: nothing tells which of them work for it. One that makes a mesh meanwhile
    is warned that this one isn't private. As a decorator it goes into any thread:

    >>> with private_groups():  # doctest: +SKIP
    ...     second = init_device_mesh("cpu", (8,))  # runs beside the first mesh
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
    """Say that a mesh which isn't private is made while another thread, or another
    task, is in a block."""
    holders = list(_blocks)
    if holders and not making_private.get():
        warnings.warn(
            f"A mesh made here, in thread {threading.current_thread().name}, isn't "
            "private, though private_groups() is "
            f"open in thread {holders[-1]}: a block doesn't reach into other threads. "
            "If the mesh is to be private, "
            "open the block where it is made, as in "
            "pool.submit(private_groups()(build)). If not, all is well.",
            stacklevel=2,
        )


class Universe:
    """What a root mesh and all its views have in common of groups.

    Attributes:
        rank_map: of the root.
        number: counts the universes over this rank map in this world, the same on all
            its ranks.
        private: what tells a private universe from its equals; None if it isn't
            private.
        table: the groups that were made for its axes.
        joint: the names of the groups over several axes together, by the indices that
            they hold and what they can do; empty names on ranks outside.
        overrides: the backend and options that were given, by the name of the group
            that was made with them; on a rank outside by the name of the axis and its
            layout.
        serial: differs from every other universe of this process.
        version: counts the changes of `joint`; with `serial`, for whoever remembers
            what is there.
    """

    def __init__(
        self, world: World, rank_map: RankMap, number: int, private: str | None
    ) -> None:
        self.world = world
        self.rank_map = rank_map
        self.number = number
        self.private = private
        self.table = GroupTable()
        self.joint: dict[tuple[_FlatLayout, Kind], str] = {}
        # Of these, those that their owner asked for by `prepare`, instead of the option
        # `flatten`.
        self.asked_for: set[tuple[_FlatLayout, Kind]] = set()  # overlay only
        self.overrides: dict[str | tuple[str, _FlatLayout], Override] = {}
        # The axes that the default group serves, for `status()`.
        self.by_default: dict[str, None] = {}  # overlay only
        self.serial = next(_serials)
        self.version = 0
        # by meshes, as their state
        self.held: weakref.WeakSet[Holder] = weakref.WeakSet()


class Holder(Protocol):
    """The shared state of a mesh, as far as a universe needs it."""

    rank_map: RankMap
    private: str | None
    universe: Universe | None
    saved_number: int | None


class World:
    """What meshes left behind in one world, the same on every rank that made the same
    calls.

    Attributes:
        universes: in the order in which they were opened; a pickle may name each.
        left: those of which a mesh is gone in this process, and that `_close_left` may
            still close.
        compared: how many times ranks compared meshes (see `check_same_mesh`).
        left_before: how often ranks gave up comparing in earlier worlds on the same
            store.
        line: what this rank said last of a mesh that it is about to build (see
            `leave_line`).
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
            self.universes.append(
                Universe(self, rank_map, self._opened[rank_map], private)
            )
            return self.universes[-1]

    def next_private(self, rank_map: RankMap) -> str:
        """What tells the next private universe over these ranks from any other, the
        same on all of them.

        It names the ranks, since a window of a private mesh keeps it, beside private
        meshes over the window's ranks.
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


def find_universe(
    rank_map: RankMap, private: str | None, number: int | None
) -> Universe | None:
    """The universe of this number over these ranks, else the first; None if none is
    here that is as private."""
    universes = current_world().universes
    alike = [
        known
        for known in universes
        if (known.rank_map, known.private) == (rank_map, private)
    ]
    return next(
        (known for known in alike if known.number == number),
        alike[0] if alike else None,
    )


def join_universe(shared: Holder) -> None:
    """Let a loaded mesh have the groups of the universe that it was saved from, else of
    the first that is alike."""
    if (
        shared.universe is None
        and shared.saved_number is not None
        and distributed_c10d.is_initialized()
    ):
        shared.universe = find_universe(
            shared.rank_map, shared.private, shared.saved_number
        )
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
    """Note that a mesh of a universe is gone, once it is; `_close_left` sees whether
    others are left."""
    universe.held.add(shared)
    noted: Any = weakref.finalize(shared, universe.world.left.setdefault, universe)
    noted.atexit = False


def _close_left(world: World) -> None:
    """Destroy the joint groups of universes that no mesh is left of, for which their
    owner has no name. This rank must have destroyed every group of an axis; until then
    it is asked again before each next universe.

    Not where every rank of the world makes each group: who loads a mesh of such a
    universe later may need a joint group again, and ranks outside don't know that it is
    gone.
    """
    alone = members_create(distributed_c10d._get_default_group(), None)
    for universe in list(world.left):
        del world.left[universe]  # a mesh that goes from here on puts it back
        entries = universe.table.entries.values()
        axes = [entry for entry in entries if entry.group_name and entry.serves_axis]
        joint = [
            entry.group
            for entry in entries
            if entry.group is not None and not entry.serves_axis
        ]
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
