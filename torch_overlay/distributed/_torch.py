"""The seam: everything in which releases of torch differ, or this package from
upstream.

Code under ``distributed/`` is written for the newest torch, and asks this file for the
rest. Every branch names the release that ends it, so a release that is dropped takes
its branches along. Start at `RELEASE` and the section that you need: layouts, groups,
redistribution, torch's own code and the profiler.

This file doesn't go upstream. There is one layout class there, `new_group` says whom a
group is for, and merging steps knows the shape of the tensor. So each of these
functions would return its first argument, and the renderer of the stack puts that in
place of the call.
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
    if RELEASE < (2, 13):
        return _FlatLayout(_flat(axis.shape), _flat(axis.stride))
    return _FlatLayout(axis.shape, axis.stride)


def from_torch(layout: Any) -> _MeshLayout:
    """Our layout for one of torch's. Law: ``from_torch(to_torch(x)) == x``."""
    return _MeshLayout(tuple(axis_from_torch(axis) for axis in layout))


def to_torch(layout: _MeshLayout) -> Any:
    if RELEASE < (2, 13):
        return _nested_to_torch(layout)
    return torchs._MeshLayout([_axis_to_torch(axis) for axis in layout.axes])


def flattened_to_torch(axis: _FlatLayout) -> Any:
    """Torch's layout for a mesh that was flattened to this axis, spelled as torch does:
    it looks up flattened meshes by the layout."""
    if RELEASE < (2, 13):
        if len(axis.shape) > 1:
            return torchs._MeshLayout((axis.shape,), (axis.stride,))
        return torchs._MeshLayout(axis.numel(), axis.stride[0] if axis.stride else 1)
    return to_torch(_MeshLayout((axis,)))


def loaded_layout(layout: Any) -> Any:
    """A layout from a file (since 2.13 a list of axes), in the running release's
    form."""
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


@lru_cache(maxsize=4096)
def _nested_to_torch(layout: _MeshLayout) -> Any:
    """Torch's layout before 2.13, of nested tuples. It can't be changed, so meshes may
    share it."""
    sizes: list[Any] = []
    strides: list[Any] = []
    step = 1
    # From the last axis on: an axis of one rank has no stride, since ours are
    # canonical. torch gives it the step over everything to its right, as in a dense
    # mesh.
    for axis in reversed(layout.axes):
        if len(axis.shape) > 1:
            sizes.append(axis.shape)
            strides.append(axis.stride)
        else:
            sizes.append(axis.numel())
            strides.append(axis.stride[0] if axis.stride else step)
        step = axis.stride[0] * axis.shape[0] if axis.shape else step
    return torchs._MeshLayout(tuple(reversed(sizes)), tuple(reversed(strides)))


def _flat(nested: Any) -> tuple[int, ...]:
    """The numbers in nested tuples, in order."""
    if not isinstance(nested, tuple):
        return (nested,)
    return tuple(itertools.chain.from_iterable(map(_flat, nested)))


# --- Groups ---

# True while a group is created for a mesh. Released `new_group` and `split_group` both
# call `_process_group_name` with the same arguments, but the ranks of a split count
# inside its parent. This tells `_process_group_name` in compat/ that the ranks are
# those of the world.
making_for_mesh: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "making_for_mesh", default=False
)


def for_mesh(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `new_group`, which takes keywords only then, so that the group is named by
    its ranks in the world. Upstream, a split says its parent, and needs no wrapper."""

    def make_for_mesh(**arguments: Any) -> Any:
        token = making_for_mesh.set(True)
        try:
            return make(**arguments)
        finally:
            making_for_mesh.reset(token)

    return make_for_mesh


def fsdp_factor(shards: int, plain_shards: int) -> int:
    """FSDP's split factor for its shard of a dim with so many; before 2.12, plain
    ones."""
    return shards if RELEASE >= (2, 12) else plain_shards


def never_nothing(
    pack: Callable[..., torch.Tensor],
    send_splits: list[int],
    receive_splits: list[int],
    group: Any,
    own: int,
) -> Callable[..., torch.Tensor]:
    """Return the function that packs what an all-to-all sends: ``pack``, except on a
    rank of the fake backend that would receive elements and send none, which it refuses
    before 2.15. There it sends one element to itself, which nobody reads. Call this
    before the splits are used, since it changes them in place."""
    if RELEASE >= (2, 15):
        return pack
    if any(send_splits) or not any(receive_splits):
        return pack
    try:
        backend = get_backend(_resolve_process_group(group.name))
    except RuntimeError:  # tests plan for groups that don't exist
        return pack
    # No other backend may get it. The element is a constant, so compiled code could
    # take the exchange for independent of its inputs, and run it in both the forward
    # and the backward graph.
    if backend != "fake":
        return pack
    send_splits[own] = receive_splits[own] = 1
    return lambda *tensors: torch.cat([pack(*tensors), tensors[0].new_zeros(1)])


# --- Redistribution ---

# The shape of the tensor that torch redistributes step by step.
# `_optimize_transform_infos` needs it to merge steps, and has no argument for it.
moved_shape: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "moved_shape", default=None
)


def of_shape(redistribute: Callable[..., Any], shape: Any) -> Callable[..., Any]:
    """Wrap torch's redistribution so that merging knows the shape, an argument
    upstream."""

    def redistribute_shape(*arguments: Any, **named: Any) -> Any:
        token = moved_shape.set(shape)
        try:
            return redistribute(*arguments, **named)
        finally:
            moved_shape.reset(token)

    return redistribute_shape


# --- Torch's own code, and the profiler ---


def original(module: types.ModuleType | type, name: str) -> types.FunctionType:
    """A copy of a function of torch, for a body that replaces the function and still
    calls it. Make it before the patch, which swaps the code of the function itself, is
    applied."""
    function = getattr(module, name)
    kept = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    kept.__kwdefaults__ = dict(function.__kwdefaults__ or {})
    return kept


def span(name: str) -> contextlib.AbstractContextManager[object]:
    """Show a block of code in the profiler as ``torch_overlay::name``. While no
    profiler runs, this costs reading one flag. Nothing is shown under a dispatch
    mode."""
    # No span under a dispatch mode: a tracer would record its operations as part of the
    # program.
    if not profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack():
        return contextlib.nullcontext()
    return profiler.record_function(f"torch_overlay::{name}")


def spanned(name: Callable[[], str], functions: Sequence[Local]) -> Sequence[Local]:
    """These functions; while a profiler runs, one that calls them in order, in a
    span."""
    if not profiler._is_profiler_enabled:
        return functions

    def run(local: torch.Tensor) -> torch.Tensor:
        with span(name()):
            for function in functions:
                local = function(local)
        return local

    return (run,)
