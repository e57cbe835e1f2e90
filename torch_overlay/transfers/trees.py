"""Trees: dicts, lists and tuples, nested as they come, with tensors in them; each has a name, its path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def leaves(tree: Any, is_leaf: Callable[[Any], bool] = lambda part: False) -> dict[str, Any]:
    """What a tree holds, by name: the keys and places on the way to it, joined by dots.

    Args:
        is_leaf: whether a part of it is to be taken as a whole.

    Raises:
        ValueError: two have one name.

    >>> leaves({"layers": [{"weight": 1}, {"weight": 2}], "step": 3})
    {'layers.0.weight': 1, 'layers.1.weight': 2, 'step': 3}
    """
    found: dict[str, Any] = {}
    for name, leaf in _walk(tree, "", is_leaf):
        if name in found:
            raise ValueError(
                f"Two tensors of the tree are called {name!r}: a key with a dot looks like a dict in a dict."
            )
        found[name] = leaf
    return found


def mapped(function: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """The same tree with other leaves: what `function` makes of each, given its name.

    >>> mapped(lambda name, leaf: f"{name}={leaf}", ({"a": 1}, [2]))
    ({'a': '0.a=1'}, ['1.0=2'])
    """
    if isinstance(tree, dict):
        made = {key: mapped(function, part, _below(path, key)) for key, part in tree.items()}
        return made if type(tree) is dict else _like(tree, made)
    if isinstance(tree, (list, tuple)):
        parts = [mapped(function, part, _below(path, number)) for number, part in enumerate(tree)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return function(path, tree)


def _like(tree: dict[Any, Any], made: dict[Any, Any]) -> Any:
    """A copy of a dict of some other class, as an OrderedDict, with these values."""
    found = tree.copy()
    for key, value in made.items():
        found[key] = value
    return found


def _walk(tree: Any, path: str, is_leaf: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    parts: Any
    if is_leaf(tree):
        parts = None
    elif isinstance(tree, dict):
        parts = tree.items()
    elif isinstance(tree, (list, tuple)):
        parts = enumerate(tree)
    else:
        parts = None
    if parts is None:
        yield path, tree
        return
    for key, part in parts:
        yield from _walk(part, _below(path, key), is_leaf)


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
