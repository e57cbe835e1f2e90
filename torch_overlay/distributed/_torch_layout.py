"""The door between torch's layouts and ours.

``mesh._layout`` stays an instance of torch's class: pipelining, guards, pickles and LocalTensorMode read it. What we
compute with is ours, whose classes and members have the same names. The canonical form of one axis is the same on both
sides. Upstream there is one side only, and these functions, which give back what they get there, go.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch.distributed import _mesh_layout as torchs

from ._mesh_layout import _FlatLayout, _MeshLayout


@lru_cache(maxsize=4096)
def axis_to_torch(axis: _FlatLayout) -> torchs._FlatLayout:
    """The same axis in torch's form."""
    return torchs._FlatLayout(axis.shape, axis.stride)


def axis_from_torch(axis: torchs._FlatLayout) -> _FlatLayout:
    """The same axis in ours."""
    return _FlatLayout(axis.shape, axis.stride)


def to_torch(layout: _MeshLayout) -> torchs._MeshLayout:
    """The same axes in torch's form."""
    return torchs._MeshLayout([axis_to_torch(axis) for axis in layout.axes])


def from_torch(layout: torchs._MeshLayout) -> _MeshLayout:
    """The same axes in ours. Law: ``from_torch(to_torch(x)) == x``, and the other way round."""
    return _MeshLayout(tuple(axis_from_torch(axis) for axis in layout))


def as_here(layout: Any) -> torchs._MeshLayout:
    """A layout from a file, in the form that torch has here: releases before 2.13 save nested tuples."""
    held = vars(layout)
    if "axes" in held:
        return layout
    sizes, strides = held["shape"], held["stride"]
    pairs = zip(sizes, strides, strict=True) if isinstance(sizes, tuple) else [(sizes, strides)]
    return torchs._MeshLayout([torchs._FlatLayout(*pair) for pair in pairs])
