"""A table of process groups, found by their ranks in mesh order, their kind (backend and options) and an axis's name.

Whether a request finds its group is decided by its key and by the requests before it, which every member of the group
knows alike. So either all members find the group, or all of them make it. Groups that the user made with
``dist.new_group`` never enter a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.distributed_c10d import GroupName, ProcessGroup

    from .._mesh.input import Override


class Key(NamedTuple):
    """What must be equal for two requests to get one group.

    On a 2 x 4 mesh of axes dp and tp, rank 5 asks for its group of tp with ranks ``range(4, 8)``, named ``"tp"``.

    Attributes:
        ranks: in the order of the mesh; see `compact`.
        kind: the backend and options.
        name: who shares: the axes and flattened views of this name; None: all, whatever their names.
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
        apart: the token of the view of `is_apart` that has the group alone, empty until the view is made; else None.
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
    """Groups by their keys. Holds names, not groups, so that a group that was destroyed is freed."""

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = {}

    def get_or_make(
        self, keys: Sequence[Key], make: Callable[[list[list[int]]], Sequence[ProcessGroup | None]]
    ) -> list[Entry]:
        """The entries of groups: found if they were made before, else made now, all that are missing together.

        Raises:
            RuntimeError: this rank's group was made and is gone. Ranks that aren't in it can't know, so it can't be
                made again: they would not take part.
        """
        missing = [key for key in keys if key not in self.entries]
        if missing:
            groups = make([list(key.ranks) for key in missing])
            self.entries |= {key: Entry(group.group_name if group else "") for key, group in zip(missing, groups)}
        found = [self.entries[key] for key in keys]
        for key, entry in zip(keys, found):
            if entry.group_name and entry.group is None:
                raise RuntimeError(
                    f"The process group of {describe(entry.names)} over ranks {list(key.ranks)} was destroyed here, "
                    "and other ranks that must take part in making it again don't know. Build a new mesh with "
                    "init_device_mesh; its groups are new."
                )
        return found

    def forget_gone(self, key: Key) -> None:
        """Forget a group that was destroyed, where its members alone make it: they destroyed it together, as all
        must, so all of them forget it."""
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
    """The group of this name in this process, or None; names aren't used again within a world."""
    try:
        return distributed_c10d._resolve_process_group(cast("GroupName", group_name))
    except RuntimeError:
        return None


def describe(names: Sequence[str]) -> str:
    """Axes for people: ``axis 'tp'``, ``axes 'tp' and 'ep'``; of no names ``a mesh``."""
    if not names:
        return "a mesh"
    word = "axis" if len(names) == 1 else "axes"
    return f"{word} {' and '.join(map(repr, names))}"


# What a backend writes into an options object when it makes a group, and so no part of what the user chose.
_WRITTEN_BY_CREATORS = {"global_ranks_in_group", "group_name", "split_from", "split_color", "enable_reconfigure"}


class Kind(NamedTuple):
    """The backend of a group, and the options it was made with, by value."""

    backend: str
    options: Any

    @classmethod
    def of(cls, override: Override) -> Kind:
        """The kind that a backend and options ask for; without a backend, the default group's."""
        backend, options = override
        default = distributed_c10d._get_default_group()
        return cls((backend or distributed_c10d.get_backend(default)).lower(), _by_value(options))


class _Unlike:
    """Stands for options that can't be compared: equal to the same object only, which it keeps alive."""

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
        return (type(options).__name__, tuple((name, _plain(getattr(options, name, None))) for name in names))
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
