"""The door between torch's layouts and ours.

``mesh._layout`` stays an instance of its class: pipelining, guards, pickles and LocalTensorMode read it. What
we compute with is a :class:`MeshLayout`. The canonical form of one axis is the same on both sides.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.distributed._mesh_layout import _FlatLayout, _MeshLayout

from ._layout import Layout, MeshLayout


@lru_cache(maxsize=4096)
def _axis_to_torch(axis: Layout) -> _FlatLayout:
    return _FlatLayout(axis.sizes, axis.strides) if axis.sizes else _FlatLayout(1, 0)


def to_torch(layout: MeshLayout) -> _MeshLayout:
    """The same axes in torch's form."""
    return _MeshLayout([_axis_to_torch(axis) for axis in layout.axes])


def from_torch(layout: _MeshLayout) -> MeshLayout:
    """The same axes in ours. Law: ``from_torch(to_torch(x)) == x``, and the other way round."""
    return MeshLayout(tuple(Layout(axis.shape, axis.stride) for axis in layout))


def as_tensor(layout: MeshLayout, start: int, values: torch.Tensor) -> torch.Tensor:
    """What the copy of ``layout`` that starts at index ``start`` shows of ``values``, which has one dimension.

    A view, and so as quick for a million ranks as for eight, unless an axis has several modes: no stride says it then.
    """
    sizes = [size for axis in layout.axes for size in axis.sizes]
    strides = [stride for axis in layout.axes for stride in axis.strides]
    return torch.as_strided(values, sizes, strides, start).reshape(layout.sizes)
