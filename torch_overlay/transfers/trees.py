"""Trees of tensors, that is nested dicts, lists and tuples: the names of their leaves, `names=`, and placements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor.placement_types import Placement, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    Called = str | tuple[str, ...]
    Names = Callable[[str], Called] | Mapping[str, Called] | None  # from a path of the source to the target's

Placements = tuple[Placement, ...]


def leaves(tree: Any, is_leaf: Callable[[Any], bool] = lambda part: False) -> dict[str, Any]:
    """Collect the leaves of a tree by name. A name joins the keys and positions on the way to the leaf by dots.

    >>> leaves({"layers": [{"weight": 1}, {"weight": 2}], "step": 3})
    {'layers.0.weight': 1, 'layers.1.weight': 2, 'step': 3}
    """
    by_name: dict[str, Any] = {}
    for name, leaf in _walk(tree, "", is_leaf):
        if name in by_name:
            raise ValueError(
                f"Two tensors of the tree are called {name!r}: a key with a dot looks like a dict in a dict."
            )
        by_name[name] = leaf
    return by_name


def mapped(function: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """Build a tree of the same form and types whose leaves are `function(name, leaf)`.

    >>> mapped(lambda name, leaf: f"{name}={leaf}", ({"a": 1}, [2]))
    ({'a': '0.a=1'}, ['1.0=2'])
    """
    if isinstance(tree, dict):
        values = {key: mapped(function, part, _below(path, key)) for key, part in tree.items()}
        return values if type(tree) is dict else _with_values(tree, values)
    if isinstance(tree, (list, tuple)):
        parts = [mapped(function, part, _below(path, number)) for number, part in enumerate(tree)]
        # A named tuple takes its fields as separate arguments; any other list or tuple takes one iterable.
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return function(path, tree)


def _with_values(tree: dict[Any, Any], values: dict[Any, Any]) -> Any:
    """Copy a dict of a subclass, such as OrderedDict, and set other values under its keys."""
    copied = tree.copy()
    for key, value in values.items():
        copied[key] = value
    return copied


def _walk(tree: Any, path: str, is_leaf: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each leaf, in the order of the tree. `path` is the name of the tree itself."""
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
    """Return the name of what stands under `key` in the part of the tree that is called `path`."""
    return f"{path}.{key}" if path else str(key)


def names_for(path: str, names: Any, may_skip: bool = False) -> Sequence[str]:
    """Return the names of the target that belong to a path of the source. Empty if `names` gives None for it, and
    may."""
    called = path if names is None else names(path) if callable(names) else names.get(path, path)
    if may_skip and called is None:
        return ()
    several = called if isinstance(called, (tuple, list)) else (called,)
    if not all(isinstance(name, str) for name in several):
        raise TypeError(f"names gives {called!r} for {path!r}; it gives a name, or a tuple of names.")
    return several


def paths_of(tree: Any, names: Any, is_leaf: Callable[[Any], bool]) -> dict[str, str]:
    """Return the paths of a source's tensors that `names` calls otherwise, by the names of the target."""
    if names is None:
        return {}
    paths = [path for path, leaf in leaves(tree, is_leaf).items() if leaf is not None]
    pairs = [(name, path) for path in paths for name in names_for(path, names)]
    return {name: path for name, path in pairs if name != path}


def with_paths(text: str, paths: Mapping[str, str]) -> str:
    """Return an error's text in which sources also have the paths under which they were given: their names are those of
    the target, which a source needn't have.

    >>> with_paths("the source 'head.w' is sparse", {"head.w": "embed.w"})
    "the source 'head.w' (given as 'embed.w') is sparse"
    """
    for name, path in paths.items():
        text = text.replace(f"source {name!r} ", f"source {name!r} (given as {path!r}) ")
    return text


def target_placements(
    tensors: dict[str, DTensor], placements: Any, mesh: DeviceMesh | None
) -> dict[str, tuple[DeviceMesh, Placements]]:
    """Return the mesh and the placements that each tensor is to have, for `redistribute`."""
    placements_of = _placements_function(placements)
    targets = {}
    for name, tensor in tensors.items():
        given, onto = placements_of(name, tensor), mesh if mesh is not None else tensor.device_mesh
        chosen = (given,) * onto.ndim if isinstance(given, Placement) else given
        if not _are_placements(chosen):
            raise TypeError(f"placements for {name!r}: needed a placement or one for each axis, got {given!r}")
        if len(chosen) != onto.ndim:
            raise ValueError(f"placements for {name!r}: a mesh of {onto.ndim} axes needs as many, got {len(chosen)}")
        targets[name] = onto, tuple([_with_dim_from_start(name, tensor, placement) for placement in chosen])
    return targets


def _placements_function(placements: Any) -> Callable[[str, DTensor], Any]:
    """Make one function of the three forms of `placements=`."""
    if isinstance(placements, Placement) or _are_placements(placements):
        return lambda name, tensor: placements
    if callable(placements):
        return placements  # type: ignore[no-any-return]
    tree = leaves(placements, lambda leaf: _are_placements(leaf))

    def from_tree(name: str, tensor: DTensor) -> Any:
        """Return what the tree has under a name."""
        if name not in tree:
            raise ValueError(f"placements: the tree has none for {name!r}")
        return tree[name]

    return from_tree


def _are_placements(given: Any) -> bool:
    """True for a sequence of nothing but placements. An empty one is right for a mesh without axes."""
    return isinstance(given, Sequence) and all(isinstance(placement, Placement) for placement in given)


def _with_dim_from_start(name: str, tensor: DTensor, placement: Placement) -> Placement:
    """Return the placement with a dim that isn't negative."""
    if type(placement) is not Shard:
        return placement
    if not -tensor.ndim <= placement.dim < tensor.ndim:
        raise ValueError(f"placements for {name!r}: {placement} of a tensor with {tensor.ndim} dims")
    return placement if placement.dim >= 0 else Shard(placement.dim + tensor.ndim)
