"""The seam: what this code needs from a released torch that differs between releases,
or that upstream doesn't need.

Code under ``distributed/`` is written for the newest torch and asks this file alone.
Every branch names the release that ends it. The file stays here. Upstream there is one
layout class, `new_group` says whom a group is for, and a merge knows the tensor's
shape, so each of these functions would return its first argument and the renderer drops
its calls.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import types
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler as profiler
from torch.distributed import _mesh_layout as torchs
from torch.distributed.distributed_c10d import _resolve_process_group, get_backend

from ..versions import running
from ._mesh_layout import _FlatLayout, _MeshLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Local = Callable[[torch.Tensor], torch.Tensor]

RELEASE = running().number


# --- Layouts ---
# ``mesh._layout`` stays an instance of torch's class: pipelining, guards, pickles and
# LocalTensorMode read it. We compute with our own, whose classes and members have the
# same names. Since 2.13 torch's layout is a list of axes in our canonical form. Before,
# an axis is a size and a stride, or nested tuples of them, and the form isn't
# canonical: a flattened mesh has the layout ``8:1``, and any other mesh of one axis
# ``(8,):(1,)``.


def axis_from_torch(axis: Any) -> _FlatLayout:
    """Torch's axis as ours."""
    if RELEASE < (2, 13):
        return _FlatLayout(_flat(axis.shape), _flat(axis.stride))
    return _FlatLayout(axis.shape, axis.stride)


def from_torch(layout: Any) -> _MeshLayout:
    """Torch's layout as ours. Law: ``from_torch(to_torch(x)) == x``."""
    return _MeshLayout(tuple(axis_from_torch(axis) for axis in layout))


@lru_cache(maxsize=4096)
def to_torch(layout: _MeshLayout) -> Any:
    """Our layout as torch's."""
    if RELEASE < (2, 13):
        return torchs._MeshLayout(*_sizes_and_strides(layout))
    return torchs._MeshLayout([_axis_to_torch(axis) for axis in layout.axes])


def flattened_to_torch(axis: _FlatLayout) -> Any:
    """The layout of a mesh that was flattened to this axis, as torch writes it and
    finds the mesh by."""
    if RELEASE < (2, 13):
        if len(axis.shape) > 1:
            return torchs._MeshLayout((axis.shape,), (axis.stride,))
        return torchs._MeshLayout(axis.numel(), axis.stride[0] if axis.stride else 1)
    return to_torch(_MeshLayout((axis,)))


def loaded_layout(layout: Any) -> Any:
    """A layout that was loaded from a file, in the form that the running torch has.

    Since 2.13 a file holds a list of axes, before it holds nested tuples. Either
    release reads both.
    """
    fields = vars(layout)
    axes = fields.get("axes")
    if RELEASE < (2, 13):
        return layout if axes is None else to_torch(from_torch(axes))
    if axes is not None:
        return layout
    sizes, strides = fields["shape"], fields["stride"]
    pairs = (
        zip(sizes, strides, strict=True)
        if isinstance(sizes, tuple)
        else [(sizes, strides)]
    )
    return torchs._MeshLayout([torchs._FlatLayout(*pair) for pair in pairs])


@lru_cache(maxsize=4096)
def _axis_to_torch(axis: _FlatLayout) -> Any:
    return torchs._FlatLayout(axis.shape, axis.stride)


def _sizes_and_strides(layout: _MeshLayout) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Nested tuples, from the last axis to the first: an axis of one rank has no stride
    of its own and gets the step over what lies right of it, as torch gives it in a
    dense mesh."""
    sizes: list[Any] = []
    strides: list[Any] = []
    step = 1
    for axis in reversed(layout.axes):
        if len(axis.shape) > 1:
            sizes.append(axis.shape)
            strides.append(axis.stride)
        else:
            sizes.append(axis.numel())
            strides.append(axis.stride[0] if axis.stride else step)
        step = axis.stride[0] * axis.shape[0] if axis.shape else step
    return tuple(reversed(sizes)), tuple(reversed(strides))


def _flat(nested: Any) -> tuple[int, ...]:
    """The numbers in nested tuples, in order."""
    if not isinstance(nested, tuple):
        return (nested,)
    return tuple(itertools.chain.from_iterable(map(_flat, nested)))


# --- Groups ---

# True while a group is made for a mesh. `new_group` takes no name and asks
# `_process_group_name` for one, as `split_group` does with ranks that count inside the
# parent; here both call the same function with the same arguments.
making_for_mesh: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "making_for_mesh", default=False
)


def for_mesh(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a constructor of groups so that its group is named by the ranks of the
    world.

    Upstream a split says its parent.
    """

    def make_for_mesh(**arguments: Any) -> Any:
        token = making_for_mesh.set(True)
        try:
            return make(**arguments)
        finally:
            making_for_mesh.reset(token)

    return make_for_mesh


def never_nothing(
    pack: Callable[..., torch.Tensor],
    send_splits: list[int],
    receive_splits: list[int],
    group: Any,
    own: int,
) -> Callable[..., torch.Tensor]:
    """Let a rank of the fake backend send one element to itself where it would receive
    and send nothing.

    Before 2.15 the fake group refuses to send nothing while something comes. Nobody
    reads the element. No other backend gets it: it is a constant, so compiled code
    could take the exchange for independent of its inputs and run it in the forward and
    in the backward graph. Call this before the splits are used: it changes them in
    place.
    """
    if any(send_splits) or not any(receive_splits):
        return pack
    try:
        backend = get_backend(_resolve_process_group(group.name))
    except RuntimeError:  # planned for a group that isn't made, as tests do
        return pack
    if backend != "fake":
        return pack
    send_splits[own] = receive_splits[own] = 1
    return lambda *tensors: torch.cat([pack(*tensors), tensors[0].new_zeros(1)])


# --- Redistribution ---

# The shape of the tensor that torch's steps redistribute, for
# `_optimize_transform_infos`, which isn't told.
moved_shape: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "moved_shape", default=None
)


def of_shape(redistribute: Callable[..., Any], shape: Any) -> Callable[..., Any]:
    """Wrap torch's steps so that their merging knows the tensor's shape. Upstream it is
    an argument."""

    def redistribute_shape(*arguments: Any, **named: Any) -> Any:
        token = moved_shape.set(shape)
        try:
            return redistribute(*arguments, **named)
        finally:
            moved_shape.reset(token)

    return redistribute_shape


# --- Torch's own code, and the profiler ---


def original(module: types.ModuleType | type, name: str) -> types.FunctionType:
    """A copy of torch's function under another identity, for a body that replaces it
    and still calls it.

    The copy keeps the code that the function has now: a patch swaps the code of the
    function and leaves the copy alone.
    """
    function = getattr(module, name)
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = dict(function.__kwdefaults__ or {})
    return copy


def span(name: str) -> contextlib.AbstractContextManager[object]:
    """A block of code as a span ``torch_overlay::name`` of the profiler. Costs a look
    at a flag while no profiler runs.

    No span under a dispatch mode: a tracer would record the span's own operations as a
    part of the program.
    """
    if not profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack():
        return contextlib.nullcontext()
    return profiler.record_function(f"torch_overlay::{name}")


def spanned(name: Callable[[], str], functions: Sequence[Local]) -> Sequence[Local]:
    """These functions; while a profiler runs, as one that calls them within a span."""
    if not profiler._is_profiler_enabled:
        return functions

    def run(local: torch.Tensor) -> torch.Tensor:
        with span(name()):
            for function in functions:
                local = function(local)
        return local

    return (run,)
