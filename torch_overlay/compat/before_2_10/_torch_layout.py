"""The door between torch's layouts and ours where torch has none: a mesh holds ours."""

from __future__ import annotations

import itertools
from typing import Any

from torch_overlay.distributed._mesh_layout import _FlatLayout, _MeshLayout


def axis_to_torch(axis: _FlatLayout) -> _FlatLayout:
    return axis


def axis_from_torch(axis: _FlatLayout) -> _FlatLayout:
    return axis


def to_torch(layout: _MeshLayout) -> _MeshLayout:
    return layout


def from_torch(layout: _MeshLayout) -> _MeshLayout:
    return layout


def as_here(layout: Any) -> _MeshLayout:
    """A layout from a file, as ours: torch saves a list of axes since 2.13, and nested tuples before."""
    if isinstance(layout, _MeshLayout):
        return layout
    held = vars(layout)
    if "axes" in held:
        return _MeshLayout(tuple(_FlatLayout(axis.shape, axis.stride) for axis in held["axes"]))
    sizes, strides = held["shape"], held["stride"]
    pairs = zip(sizes, strides, strict=True) if isinstance(sizes, tuple) else [(sizes, strides)]
    return _MeshLayout(tuple(_FlatLayout(_flat(size), _flat(stride)) for size, stride in pairs))


def _flat(nested: Any) -> tuple[int, ...]:
    if not isinstance(nested, tuple):
        return (nested,)
    return tuple(itertools.chain.from_iterable(map(_flat, nested)))
