"""Lets releases before 2.13 read files of later ones, which name a class that these releases lack."""

from __future__ import annotations

from typing import Any

from torch import _weights_only_unpickler as reader


class _FlatLayout:
    """One axis of a layout, as torch saves it since 2.13. Only unpickling makes an instance here, since before 2.13 the
    layout of a mesh is nested tuples."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


_FlatLayout.__module__ = "torch.distributed._mesh_layout"  # the name in files, which the weights_only reader checks


def install_safe_globals() -> set[Any]:
    """Allow ``torch.load(weights_only=True)`` to make a flat layout. Returns the classes that were allowed before."""
    allowed = reader._marked_safe_globals_set
    reader._add_safe_globals([_FlatLayout])
    return allowed


def uninstall_safe_globals(allowed: set[Any]) -> None:
    """Undo `install_safe_globals`: torch gets back its own set, unless somebody allowed more classes meanwhile."""
    reader._remove_safe_globals([_FlatLayout])
    if reader._marked_safe_globals_set == allowed:
        reader._marked_safe_globals_set = allowed
