"""Which process groups the meshes of one universe share, as plain values: the settings
in force, and which key finds which group.

A universe is a root mesh with all its views. It is the unit in which groups are shared.
``mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))`` opens one, and
``mesh["tp"]`` and ``mesh._flatten()`` belong to it. The same call again opens another
universe, and the two share no group. Groups that the user made with ``dist.new_group``
are never part of one.

Start at `Universe` and `GroupTable.get_or_make`. Whether a request finds its group
depends on its key and on the requests before it, and every member of the group knows
these. So either all members find the group, or all of them create it (see groups.py).

A `World` keeps the universes of one default process group. They outlive the meshes, as
groups do, and end with the default group.
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
    """The settings for groups and redistributions, under their names in
    torch.distributed.config."""

    mesh_share_groups: str
    mesh_create_groups: str
    mesh_joint_groups: str
    mesh_check: bool
    plan_redistribution: bool


# The values that each setting of text accepts.
_ACCEPTED = {
    "mesh_share_groups": ("names", "ranks", "off"),
    "mesh_create_groups": ("members", "world"),
    "mesh_joint_groups": ("existing", "whole"),
}


def get_settings() -> Settings:
    """The settings in force now. Ask at each use: a user may change them."""
    return _make_settings(*[getattr(config, name) for name in Settings._fields])


@functools.lru_cache(maxsize=64)
def _make_settings(*values: object) -> Settings:
    """`Settings` of these values. Cached: every redistribution calls it."""
    settings = Settings(*values)  # type: ignore[arg-type]
    for name, accepted in _ACCEPTED.items():
        value = getattr(settings, name)
        if value not in accepted:
            raise ValueError(
                f"torch.distributed.config.{name} is one of {', '.join(accepted)}, got "
                f"{value!r}"
            )
    return settings


def members_create(world: ProcessGroup, backend: str | None) -> bool:
    """True if members create a group without other ranks: the setting and backend
    allow."""
    name = (backend or distributed_c10d.get_backend(world)).lower()
    if config.use_torchcomms and backend == "fake":
        # Whatever the setting: compiled code can't resolve numbered names beside the
        # names that splits have.
        return True
    # MPI needs all ranks. A device-bound NCCL world makes groups by a split, in which
    # all ranks take part, and so does torchcomms.
    return (
        get_settings().mesh_create_groups == "members"
        and not makes_communicators(world)
        and "mpi" not in name
    )


def makes_communicators(world: ProcessGroup) -> bool:
    """True if a new group has its communicator and its memory before a first
    collective."""
    return world.bound_device_id is not None or config.use_torchcomms


class Key(NamedTuple):
    """What must be equal for two requests to get the same group.

    On a 2 x 4 mesh with axes dp and tp, rank 5 asks for its group of tp with ranks
    ``range(4, 8)`` and name ``"tp"``.

    Attributes:
        ranks: the ranks of the group, in the order of the mesh; see `compact`.
        kind: the backend and the options.
        name: the axes and flattened views of this name share the group. None: all axes
            share it, whatever their names.
        number: 0 for a group that may be shared. A group that no other request gets has
            a number above 0, which no equal key has.
    """

    ranks: tuple[int, ...] | range
    kind: Kind
    name: str | None
    number: int = 0


@dataclass(slots=True)
class Entry:
    """A group that was created.

    Attributes:
        group_name: c10d's name of the group; empty on a rank that isn't in it.
        names: the axes that it serves, in the order in which they asked for it.
        serves_axis: True if an axis asked for it, False if only redistributions over
            several axes did.
        apart: None, or the token of the view that alone has the group, see `is_apart`.
            Empty between the creation of the group and that of the view.
    """

    group_name: str
    names: list[str] = field(default_factory=list)
    serves_axis: bool = False
    apart: str | None = None

    @property
    def group(self) -> ProcessGroup | None:
        """The group. None if this rank isn't in it, or if it was destroyed."""
        return find_group(self.group_name) if self.group_name else None


class GroupTable:
    """Groups by their keys. It holds names, not groups, so that a group that the user
    destroys is freed."""

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = {}

    def get_or_make(
        self,
        keys: Sequence[Key],
        make: Callable[[list[list[int]]], Sequence[ProcessGroup | None]],
    ) -> list[Entry]:
        """The entry for each key. One call of ``make`` creates all missing groups; if
        it raises, nothing is entered."""
        missing = [key for key in keys if key not in self.entries]
        if missing:
            groups = make([list(key.ranks) for key in missing])
            self.entries |= {
                key: Entry(group.group_name if group else "")
                for key, group in zip(missing, groups)
            }
        entries = [self.entries[key] for key in keys]
        for key, entry in zip(keys, entries):
            if entry.group_name and entry.group is None:
                raise RuntimeError(
                    f"The process group of {axes_text(entry.names)} over ranks "
                    f"{list(key.ranks)} was destroyed here, "
                    "and other ranks that must take part in making it again don't "
                    "know. Build a new mesh with "
                    "init_device_mesh; its groups are new."
                )
        return entries

    def forget_gone(self, key: Key) -> None:
        """Forget the group of this key if it was destroyed. Call it only for groups
        that members create alone: all members destroyed it, so all of them forget
        it."""
        entry = self.entries.get(key)
        if entry is not None and entry.group_name and entry.group is None:
            del self.entries[key]

    def unused_key(self, key: Key) -> Key:
        """This key with the lowest number from 1 on that isn't in the table."""
        number = 1
        while key._replace(number=number) in self.entries:
            number += 1
        return key._replace(number=number)


def find_group(group_name: str) -> ProcessGroup | None:
    """This process's group of this name, unless destroyed. c10d doesn't reuse names."""
    try:
        return distributed_c10d._resolve_process_group(cast("GroupName", group_name))
    except RuntimeError:
        return None


# Fields that a backend writes into an options object when it creates a group. They say
# nothing about what the user chose, so two requests may differ in them.
_WRITTEN_BY_CREATORS = {
    "global_ranks_in_group",
    "group_name",
    "split_from",
    "split_color",
    "enable_reconfigure",
}


class Kind(NamedTuple):
    """The backend of a group and the options that it was made with, as comparable
    values."""

    backend: str
    options: Any

    @classmethod
    def of(cls, override: Override) -> Kind:
        """The kind of group of a backend and options; without, the default group's."""
        backend, options = override
        default_group = distributed_c10d._get_default_group()
        return cls(
            (backend or distributed_c10d.get_backend(default_group)).lower(),
            _options_by_value(options),
        )


class _ComparedByIdentity:
    """Options of a class that we can't compare by value. They equal only the same
    object. It is kept alive, so that its id isn't used for another one."""

    def __init__(self, options: Any) -> None:
        self.options = options

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ComparedByIdentity) and other.options is self.options

    def __hash__(self) -> int:
        return id(self.options)


def _options_by_value(options: Any) -> Any:
    """A value that is equal for equal options, without fields that a backend writes.
    Options with a field that we can't compare equal only the same object."""
    # Two axes with equal options share a group, so options are compared by value. Most
    # options classes have no __eq__.
    if options is None:
        return None
    names = [name for name in _fields(options) if name not in _WRITTEN_BY_CREATORS]
    try:
        return (
            type(options).__name__,
            tuple((name, _comparable(getattr(options, name, None))) for name in names),
        )
    except TypeError:
        return _ComparedByIdentity(options)


def _fields(value: Any) -> list[str]:
    """The names of an object's attributes, without methods."""
    # dir and not vars: the options of C++ backends have no __dict__.
    names = [name for name in dir(value) if not name.startswith(("__", "_pybind"))]
    return [name for name in names if not callable(getattr(type(value), name, None))]


def _comparable(value: Any) -> Any:
    """The value in a form that is equal for equal values."""
    if value is None or isinstance(value, (bool, int, float, str, timedelta)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_comparable, value))
    if type(value).__name__ == "NCCLConfig":
        return tuple(
            (name, _comparable(getattr(value, name))) for name in _fields(value)
        )
    raise TypeError(value)


# For opening worlds and universes.
_lock = threading.RLock()
_serials = itertools.count(1)

# True inside a block of `private_groups`.
making_private: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "making_private", default=False
)
_blocks: list[str] = []  # the thread of each open block, for the warning to others


@contextlib.contextmanager
def private_groups() -> Iterator[None]:
    """Meshes that are built inside this block get groups that no other mesh shares. A
    mesh of `from_group` keeps the groups that it is given, and isn't private.

    Privacy belongs to the universe. Views of such a mesh that are made after the block,
    copies and pickles keep it. Redistributions over them use no group from outside, not
    even the default group. If a mesh from outside is flattened or unflattened inside
    the block, the new axes get groups of their own.

    The block covers its own code and what runs in the same context: asyncio tasks that
    it starts, and `asyncio.to_thread`. It doesn't cover other threads, since nothing
    tells which of them work for it. A thread that builds a mesh during the block gets a
    warning that this mesh isn't private. Used as a decorator, it works in any thread:

    >>> with private_groups():  # doctest: +SKIP
    ...     second = init_device_mesh("cpu", (8,))  # runs beside the first mesh
    >>> pool.submit(private_groups()(init_device_mesh), "cpu", (8,))  # doctest: +SKIP
    """
    thread = threading.current_thread().name
    _blocks.append(thread)
    try:
        with made_private():
            yield
    finally:
        _blocks.remove(thread)


@contextlib.contextmanager
def made_private() -> Iterator[None]:
    """Make groups private in this block. Other threads get no warning about it."""
    token = making_private.set(True)
    try:
        yield
    finally:
        making_private.reset(token)


def warn_outside_of_blocks() -> None:
    """Warn that a new mesh isn't private while a block of `private_groups` is open in
    another thread or task, and none here."""
    # A user who opens the block in one thread and builds in another would otherwise
    # find out from collectives of two meshes that run in one group.
    threads = list(_blocks)
    if threads and not making_private.get():
        warnings.warn(
            f"A mesh made here, in thread {threading.current_thread().name}, isn't "
            "private, though private_groups() is "
            f"open in thread {threads[-1]}: a block doesn't reach into other threads. "
            "If the mesh is to be private, "
            "open the block where it is made, as in "
            "pool.submit(private_groups()(build)). If not, all is well.",
            stacklevel=2,
        )


_NOTHING: frozenset[Any] = frozenset()  # overlay only


class Universe:
    """The groups of a root mesh and all its views.

    Attributes:
        world: the world that it belongs to.
        rank_map: the rank map of the root mesh.
        number: 1 for the first universe over this rank map in this world, 2 for the
            next. Equal on all its ranks, so a pickle can name the universe.
        private: a token that tells private universes apart; None if it isn't private.
        table: the groups that were created.
        joint: the names of the joint groups, by their indices and their kind. The name
            is empty on ranks outside.
        overrides: the backend and options that the user gave, by the name of the group;
            on a rank outside, by the name and the layout of the axis.
        serial: a number that no other universe of this process has.
        version: counts the changes of `joint`. Caches are keyed by `serial` and
            `version`.
        living: how many shared states of meshes live.
    """

    # A world keeps its universes, also of a program that makes meshes in a loop.
    __slots__ = (
        "asked_for",  # overlay only
        "by_default",  # overlay only
        "joint",
        "living",
        "number",
        "overrides",
        "private",
        "rank_map",
        "serial",
        "table",
        "version",
        "world",
    )

    def __init__(
        self, world: World, rank_map: RankMap, number: int, private: str | None
    ) -> None:
        """Make a universe without groups. It isn't added to its world."""
        self.world = world
        self.rank_map = rank_map
        self.number = number
        self.private = private
        self.table = GroupTable()
        self.joint: dict[tuple[_FlatLayout, Kind], str] = {}
        # The joint groups that the user asked for by `prepare`. They are used also
        # where the setting mesh_joint_groups is "existing".
        self.asked_for: frozenset[Any] = _NOTHING  # overlay only
        self.overrides: dict[str | tuple[str, _FlatLayout], Override] = {}
        # The axes that the default group serves, for `status()`.
        self.by_default: dict[str, None] = {}  # overlay only
        self.serial = next(_serials)
        self.version = 0
        self.living = 0


class Holder(Protocol):
    """The part of a mesh's SharedState that a universe needs."""

    rank_map: RankMap
    private: str | None
    universe: Universe | None
    saved_number: int | None


class World:
    """The universes of one default process group. It is the same on every rank that
    made the same mesh calls.

    Attributes:
        universes: in the order in which they were opened.
        left: universes of which a mesh is gone in this process.
            `_destroy_abandoned_groups` looks at them.
        compared: how often ranks compared meshes (see `check_same_mesh`).
        left_before: how often ranks gave up comparing, in earlier worlds on the same
            store.
        last_lines: the settings of this rank, and a line for each of its last meshes
            (see `leave_line`).
        built: how many meshes it built over the same ranks, by a text for them.
    """

    def __init__(self) -> None:
        self.universes: list[Universe] = []
        self.left: dict[Universe, None] = {}
        self.compared, self.left_before = 0, 0
        self.last_lines = ""
        self.built: Counter[str] = Counter()
        self._private: Counter[RankMap] = Counter()
        self._opened: Counter[RankMap] = Counter()
        # One of those that are equal.
        self._maps: dict[RankMap, RankMap] = {}  # overlay only

    def open_universe(self, rank_map: RankMap, private: str | None = None) -> Universe:
        """Make and keep a new universe over these ranks; destroys abandoned joint
        groups."""
        with _lock:
            # Opening is where a program that builds meshes in a loop comes by again.
            _destroy_abandoned_groups(self)
            self._opened[rank_map] += 1
            rank_map = self._maps.setdefault(rank_map, rank_map)  # overlay only
            self.universes.append(
                Universe(self, rank_map, self._opened[rank_map], private)
            )
            return self.universes[-1]

    def next_private(self, rank_map: RankMap) -> str:
        """Return a new token for a private universe over these ranks, the same on all
        ranks that made the same calls. The ranks are part of it: a window of a private
        mesh keeps the mesh's token, and must differ from a private mesh over its own
        ranks."""
        self._private[rank_map] += 1
        return f"private {self._private[rank_map]} over {rank_map.key}"


_worlds: weakref.WeakKeyDictionary[ProcessGroup, World] = weakref.WeakKeyDictionary()


def current_world() -> World:
    """The world that this thread is in. It is made when it is first asked for."""
    group = distributed_c10d._get_default_group()
    # The threaded test backend has a default group, and so a world, for each thread.
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
    """The universe over these ranks, with this token and number, or else the first
    one."""
    universes = current_world().universes
    candidates = [
        universe
        for universe in universes
        if (universe.rank_map, universe.private) == (rank_map, private)
    ]
    return next(
        (universe for universe in candidates if universe.number == number),
        candidates[0] if candidates else None,
    )


def join_universe(shared: Holder) -> None:
    """Store in ``shared.universe`` the universe of a loaded mesh, whose groups it then
    uses: the one it was saved from, or else the first over the same ranks with the same
    ``private`` token. Does nothing before init_process_group or if there is none."""
    if (
        shared.universe is None
        and shared.saved_number is not None
        and distributed_c10d.is_initialized()
    ):
        shared.universe = find_universe(
            shared.rank_map, shared.private, shared.saved_number
        )
        if shared.universe is not None:
            _note_when_mesh_is_gone(shared, shared.universe)


def universe_of(shared: Holder) -> Universe:
    """The universe of a mesh in this world, opened by the first request for a group."""
    world = current_world()
    join_universe(shared)
    # A mesh may outlive its world: after destroy_process_group and init_process_group
    # its groups are gone, and it gets new ones.
    if shared.universe is None or shared.universe.world is not world:
        shared.universe = world.open_universe(shared.rank_map, shared.private)
        _note_when_mesh_is_gone(shared, shared.universe)
    return shared.universe


def _note_when_mesh_is_gone(shared: Holder, universe: Universe) -> None:
    """Register a mesh with its universe, which goes to ``World.left`` when it is
    collected."""
    universe.living += 1
    finalizer: Any = weakref.finalize(shared, _leave, universe)
    finalizer.atexit = False  # at exit nobody looks at the world again


def _leave(universe: Universe) -> None:
    universe.living -= 1
    universe.world.left[universe] = None


def _destroy_abandoned_groups(world: World) -> None:
    """Destroy the joint groups of universes of which no mesh is left, once the user has
    destroyed all groups of axes: no user knows a name to destroy them by.

    Not where every rank of the world takes part in creating a group: a mesh that is
    loaded later may need one again, and ranks outside don't know that it is gone.
    """
    alone = members_create(distributed_c10d._get_default_group(), None)
    for universe in list(world.left):
        del world.left[universe]  # a mesh that is collected from here on adds it again
        entries = universe.table.entries.values()
        axis_entries = [
            entry for entry in entries if entry.group_name and entry.serves_axis
        ]
        joint_groups = [
            entry.group
            for entry in entries
            if entry.group is not None and not entry.serves_axis
        ]
        # On other backends all ranks may have to destroy a communicator together, and
        # each rank collects its meshes at its own time.
        destroyed_locally = {*map(distributed_c10d.get_backend, joint_groups)} <= {
            "gloo",
            "fake",
        }
        if universe.living or not (
            alone and destroyed_locally and axis_entries and joint_groups
        ):
            continue
        if any(entry.group is not None for entry in axis_entries):
            world.left[universe] = None
            continue
        universe.joint.clear()
        universe.version += 1
        # A later request for one makes it anew, as it would if its entry was here.
        for key, entry in list(universe.table.entries.items()):  # overlay only
            if entry.group in joint_groups:
                del universe.table.entries[key]
        for group in joint_groups:
            distributed_c10d.destroy_process_group(group)
