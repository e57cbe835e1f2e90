"""The door between torch's layouts and ours where an axis of torch's is a size and a stride, or nested tuples of them.

Torch's form isn't canonical: a flattened mesh has the layout ``8:1``, and any other of one axis ``(8,):(1,)``.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

from torch.distributed import _mesh_layout as torchs

from torch_overlay.distributed._mesh_layout import _FlatLayout, _MeshLayout

Nested = Any  # an int or a tuple of these


@lru_cache(maxsize=4096)
def to_torch(layout: _MeshLayout) -> Any:
    """The same axes in torch's form; one of a single rank steps over what stands right of it, as in a dense mesh."""
    sizes: list[Nested] = []
    strides: list[Nested] = []
    step = 1
    for axis in reversed(layout.axes):
        if len(axis.shape) > 1:
            sizes.append(axis.shape)
            strides.append(axis.stride)
        else:
            sizes.append(axis.numel())
            strides.append(axis.stride[0] if axis.stride else step)
        step = axis.stride[0] * axis.shape[0] if axis.shape else step
    return torchs._MeshLayout(tuple(reversed(sizes)), tuple(reversed(strides)))


def flattened_layout(axis: _FlatLayout) -> Any:
    """The layout that torch gives to a mesh which was flattened to this axis, and by which it finds it."""
    if len(axis.shape) > 1:
        return torchs._MeshLayout((axis.shape,), (axis.stride,))
    return torchs._MeshLayout(axis.numel(), axis.stride[0] if axis.stride else 1)


def axis_from_torch(axis: Any) -> _FlatLayout:
    """The same axis in ours."""
    return _FlatLayout(_flat(axis.shape), _flat(axis.stride))


def from_torch(layout: Any) -> _MeshLayout:
    """The same axes in ours. Law: ``from_torch(to_torch(x)) == x``."""
    return _MeshLayout(tuple(axis_from_torch(axis) for axis in layout))


def _flat(nested: Nested) -> tuple[int, ...]:
    if not isinstance(nested, tuple):
        return (nested,)
    return tuple(itertools.chain.from_iterable(map(_flat, nested)))


def as_here(layout: Any) -> Any:
    """A layout from a file, in the form that torch has here: releases from 2.13 on save a list of axes."""
    axes = vars(layout).get("axes")
    return layout if axes is None else to_torch(_MeshLayout(tuple(axis_from_torch(axis) for axis in axes)))
