"""What a process group can do, as a value: one request for a group is compared with another by it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from ._mesh_input import Override

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
