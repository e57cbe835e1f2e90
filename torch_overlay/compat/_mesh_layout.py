"""What a file of a later release names, and the torch that runs doesn't know."""

from __future__ import annotations

import sys
import types
from typing import Any, NamedTuple

from torch import _weights_only_unpickler as reader
from torch import distributed

from ..distributed import _mesh_layout as ours
from ..distributed import _torch_layout


class _FlatLayout:
    """One axis of a layout, as torch saves it since 2.13. Only files make one: the layout of a mesh isn't made of these
    before."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _MeshLayout:
    """The layout of a mesh, as torch saves it since 2.10; of whatever form, `as_here` reads it."""


class ShardOrderEntry(NamedTuple):
    """Which axes of the mesh cut a dim, outer to inner, as specs say it since 2.10."""

    tensor_dim: int
    mesh_dims: tuple[int, ...]


ShardOrderEntry.__module__ = "torch.distributed.tensor._dtensor_spec"
_FlatLayout.__module__ = _MeshLayout.__module__ = (
    "torch.distributed._mesh_layout"  # as files say, and as torch's reader of weights asks
)


def believe_files(*more: type) -> set[Any]:
    """Let ``torch.load(weights_only=True)`` make a flat layout, and these."""
    believed = reader._marked_safe_globals_set
    reader._add_safe_globals([_FlatLayout, *more])
    return believed


def disbelieve_files(believed: set[Any], *more: type) -> None:
    """Take it back: the very set that was there, unless more came meanwhile."""
    reader._remove_safe_globals([_FlatLayout, *more])
    if reader._marked_safe_globals_set == believed:
        reader._marked_safe_globals_set = believed


def bring_module() -> set[Any]:
    """Before 2.10, where torch has no such module, let files find what they name there."""
    module: Any = types.ModuleType(_MeshLayout.__module__, __doc__)
    module._FlatLayout, module._MeshLayout = _FlatLayout, _MeshLayout
    sys.modules[module.__name__] = distributed._mesh_layout = module
    return believe_files(_MeshLayout, ShardOrderEntry)


def take_module(believed: set[Any]) -> None:
    """Take it back."""
    del sys.modules[_MeshLayout.__module__], distributed._mesh_layout
    disbelieve_files(believed, _MeshLayout, ShardOrderEntry)


def flattened_layout(axis: ours._FlatLayout) -> Any:
    """The layout that torch gives to a mesh which was flattened to this axis, and by which it finds it."""
    spelled = getattr(_torch_layout, "flattened_layout", None)  # before 2.13 it isn't that of an equal mesh
    return spelled(axis) if spelled else _torch_layout.to_torch(ours._MeshLayout((axis,)))
