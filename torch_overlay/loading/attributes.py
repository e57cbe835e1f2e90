"""What a model keeps outside of parameters and buffers: attributes, and the entries of containers in them.

A loader may set them: a flag for a bias that came, a cache that it derived from a weight. `PlainAttributes` takes back
what it set while it was asked, and `compare_calls` says which of it `Landings.load_whole` sets in its place.
"""

from __future__ import annotations

import copy
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_TENSOR_TABLES = "_parameters", "_buffers", "_modules"  # `ModelMemory` restores these
_CONSTANTS = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, type(None))
_CONTAINERS = (dict, list, set, deque)
ABSENT = "absent"
_CAME = "came"  # in place of a tensor that was made of the checkpoint's tensors

Where = tuple[int, str]  # an attribute: the address of the dict that holds it, and its name there


class Setting(NamedTuple):
    """An attribute, and the value that a loader gives it whatever the weights are."""

    holder: dict[str, Any]
    key: str
    value: Any

    def apply(self) -> None:
        if self.value is ABSENT:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = _copied(self.value)


class PlainAttributes:
    """The attributes of a model's modules and tensors, and of the loader's own object, as they were when this was made.

    The end of a `with` sets all attributes and entries back to the very objects that they were. Of other objects to
    which these refer only what holds a tensor on meta is set back: a server may change the rest meanwhile.
    """

    def __init__(self, model: torch.nn.Module, load: Callable[..., object]) -> None:
        self._holders: dict[int, tuple[str, dict[str, Any]]] = {}
        self._contents: list[tuple[Any, Any]] = []
        self._others: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._seen: dict[int, object] = {}  # the objects are held, so that no other gets their address
        for name, owner in _owners(model, load):
            holder = getattr(owner, "__dict__", None)
            if id(owner) not in self._seen and type(holder) is dict:
                self._seen[id(owner)] = owner
                self._holders[id(holder)] = name, holder
                self._contents.append((holder, dict(holder)))
        for _, holder in self._holders.values():
            for key, value in holder.items():
                if key not in _TENSOR_TABLES:
                    self._enter(value)

    def _enter(self, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, (*_CONSTANTS, torch.nn.Module, torch.Tensor, type)):
            return
        if isinstance(value, (tuple, *_CONTAINERS)):
            self._seen[id(value)] = value
            if not isinstance(value, tuple):
                self._contents.append((value, value.copy()))
            for each in [*value.values()] if isinstance(value, dict) else [*value]:
                self._enter(each)
        elif type(getattr(value, "__dict__", None)) is dict and not callable(value):
            self._seen[id(value)] = value
            tables = [value.__dict__, *[each for each in value.__dict__.values() if isinstance(each, dict)]]
            self._others += [(table, dict(table)) for table in tables]

    def __enter__(self) -> PlainAttributes:
        return self

    def __exit__(self, *_: object) -> None:
        for container, before in self._contents:
            if not _same_entries(container, before):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(before)
        for table, before in self._others:
            for key in [key for key, value in table.items() if value is not before.get(key) and _is_on_meta(value)]:
                if key in before:
                    table[key] = before[key]
                else:
                    del table[key]

    def read(self, came: Callable[[torch.Tensor], bool]) -> dict[Where, Any]:
        """Return all attributes in a form that can be compared."""
        return {where: _comparable(value, came, ()) for where, value in self._items()}

    def values(self) -> dict[Where, Any]:
        """Return all attributes, with copies of containers."""
        return {where: _copied(value) for where, value in self._items()}

    def _items(self) -> Iterator[tuple[Where, Any]]:
        for address, (_, holder) in self._holders.items():
            for key, value in holder.items():
                if key not in _TENSOR_TABLES:
                    yield (address, key), value

    def name(self, where: Where) -> str:
        return ".".join(filter(None, (self._holders[where[0]][0], where[1])))

    def setting(self, where: Where, values: Mapping[Where, Any]) -> Setting:
        return Setting(self._holders[where[0]][1], where[1], values.get(where, ABSENT))


def _owners(model: torch.nn.Module, load: Callable[..., object]) -> Iterator[tuple[str, object]]:
    """Yield the objects whose attributes count, with names for messages."""
    load = getattr(load, "func", load)  # of a functools.partial
    own = load if isinstance(load, torch.nn.Module) else getattr(load, "__self__", None)
    for module in [model, own] if isinstance(own, torch.nn.Module) else [model]:
        yield from module.named_modules()
        yield from module.named_parameters(remove_duplicate=False)
        yield from module.named_buffers(remove_duplicate=False)
    if own is not None:
        yield "", own


def _same_entries(container: Any, before: Any) -> bool:
    if isinstance(container, set):
        return bool(container == before)
    both = [(container, before)]
    if isinstance(container, dict):
        both.append((container.values(), before.values()))
    return len(container) == len(before) and all(a is b for one, other in both for a, b in zip(one, other))


def _is_on_meta(value: Any) -> bool:
    if isinstance(value, (tuple, *_CONTAINERS)):
        return any(map(_is_on_meta, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor) and value.is_meta


class _Object:
    """An object that only identity compares. It is held, so that no other gets its address."""

    def __init__(self, its: object) -> None:
        self.its = its

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.its is other.its

    def __hash__(self) -> int:
        return id(self.its)


def _comparable(value: Any, came: Callable[[torch.Tensor], bool], within: tuple[int, ...]) -> Any:
    if isinstance(value, _CONSTANTS):
        return type(value), repr(value)  # so NaN equals itself, and 0.0 differs from -0.0
    if isinstance(value, torch.Tensor) and came(value):
        return _CAME
    if not isinstance(value, (tuple, frozenset, *_CONTAINERS)) or id(value) in within:
        return _Object(value)
    within = (*within, id(value))
    if isinstance(value, dict):
        return type(value), tuple(
            [(_comparable(key, came, within), _comparable(each, came, within)) for key, each in value.items()]
        )
    entries = [_comparable(each, came, within) for each in value]
    return type(value), frozenset(entries) if isinstance(value, (set, frozenset)) else tuple(entries)


def _has_come(comparable: Any) -> bool:
    if isinstance(comparable, (tuple, frozenset)):
        return any(map(_has_come, comparable))
    return comparable is _CAME


def _copied(value: Any) -> Any:
    """Copy containers, also those in containers. What else they hold stays the same object."""
    if not isinstance(value, _CONTAINERS):
        return value
    own: Any = copy.copy(value)  # keeps the class, where .copy() of a subclass may not
    if isinstance(own, set):
        return own
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        own[key] = _copied(each)
    return own


def compare_calls(
    first: Mapping[Where, Any], second: Mapping[Where, Any], after: Mapping[Where, Any]
) -> tuple[list[Where], list[Where]]:
    """Compare the attributes that calls of a loader left, as `PlainAttributes.read` returns them."""
    to_set, unknown = [], []
    for where in dict.fromkeys([*first, *after]):
        wanted = first.get(where, ABSENT)
        is_constant = wanted == second.get(where, ABSENT)
        if not is_constant or (wanted != after.get(where, ABSENT) and _has_come(wanted)):
            unknown.append(where)
        elif wanted != after.get(where, ABSENT):
            to_set.append(where)
    return to_set, unknown
