"""What a file of a later release names, and the torch that runs doesn't know."""

from __future__ import annotations

from typing import Any

from torch import _weights_only_unpickler as reader


class _FlatLayout:
    """One axis of a layout, as torch saves it since 2.13. Only files make one: the layout of a mesh isn't made of these
    before."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


_FlatLayout.__module__ = "torch.distributed._mesh_layout"  # as files say, and as torch's reader of weights asks


def believe_files() -> set[Any]:
    """Let ``torch.load(weights_only=True)`` make a flat layout."""
    believed = reader._marked_safe_globals_set
    reader._add_safe_globals([_FlatLayout])
    return believed


def disbelieve_files(believed: set[Any]) -> None:
    """Take it back: the very set that was there, unless more came meanwhile."""
    reader._remove_safe_globals([_FlatLayout])
    if reader._marked_safe_globals_set == believed:
        reader._marked_safe_globals_set = believed
