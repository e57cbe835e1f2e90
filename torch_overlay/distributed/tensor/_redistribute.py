"""Redistribute a local tensor by one plan; the body that replaces torch's, and the way
back to torch's own.

What can't be planned runs step by step, with collectives merged only where that is
exact.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed.tensor._api as dtensor
from torch.autograd import forward_ad
from torch.distributed.tensor import _redistribute as torch_redistribute
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils._debug_mode import get_active_debug_mode

from .._mesh.caches import as_good_as, real_mesh
from .._torch import of_shape, original
from ._runner.answers import Fallback, count_fallback, count_run, find_answer
from ._runner.program import NOT_OF_COMPLEX
from ._runner.specs import is_known, other_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import Placement, Shard

redistribute_by_steps = original(torch_redistribute, "redistribute_local_tensor")
"""One mesh dim after the other, merged where that is exact."""


def _cuts_evenly(
    infos: list[torch_redistribute._TransformInfo],
    device_mesh: DeviceMesh,
    earlier: Sequence[torch_redistribute._TransformInfo],
    src_placements: Sequence[Placement],
    shape: Sequence[Any] | None,
) -> bool:
    """Whether every cut is even that these all-gathers undo, or these reduce-scatters
    make, and those outside of them.

    Only then is torch.chunk by all their mesh dims at once sure to be torch.chunk by
    one after the other: 6 rows are 2, 2, 2, 0 on four ranks, and 2, 1, 2, 1 on a 2 x 2
    mesh. It is asked of the whole tensor, so that all ranks run the same collectives:
    of 9 rows on 2 x 2 x 2, half of the ranks could merge the inner two gathers, and the
    others not.

    Args:
        earlier: the transforms of the plan before these.
        shape: of the whole tensor; where it isn't known, this rank decides by what it
            has.
    """
    source, target = infos[0].src_dst_placements
    dim = cast("Shard", target if source.is_partial() else source).dim
    now, own = list(src_placements), {info.mesh_dim for info in infos}
    for info in earlier:
        now[info.mesh_dim] = info.src_dst_placements[1]
    outer = [
        axis
        for axis, held in enumerate(now)
        if axis not in own and getattr(held, "dim", None) == dim
    ]
    if source.is_partial() and any(
        isinstance(held, _StridedShard)
        for held in (target, *(now[axis] for axis in outer))
    ):
        # uneven though the length may be divided by the parts: 8 rows with split factor
        # 3 are 5 and 3
        return False
    if shape is None:
        outer = []
        shape = max(
            [info.logical_shape for info in infos], key=lambda logical: logical[dim]
        )
    parts = math.prod(device_mesh.size(axis) for axis in (*own, *outer))
    return guard_or_false(shape[dim] % parts == 0)


def redistribute_local_tensor(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    use_graph_based_transform: bool | None = None,
    is_explicit: bool = False,
) -> torch.Tensor:
    """What this rank holds of the tensor under the target spec, from what it holds
    under the current one."""
    mesh = real_mesh(current_spec.mesh)
    found = find_answer(
        mesh,
        local_tensor,
        current_spec,
        target_spec,
        async_op,
        use_graph_based_transform,
    )
    if isinstance(found, Fallback):
        if local_tensor.is_complex():
            _check_complex(mesh, current_spec, target_spec)
        count_fallback(found.reason)  # overlay only
        return of_shape(redistribute_by_steps, current_spec.shape)(
            local_tensor,
            current_spec,
            target_spec,
            async_op=async_op,
            use_graph_based_transform=use_graph_based_transform,
            is_explicit=is_explicit,
        )
    count_run()  # overlay only
    # Under a dispatch mode (a tracer, CommDebugMode), a plan that is the one collective
    # of the step-by-step path runs by that path, so that the mode sees the same
    # operations. Without a mode that would take 2.4 times the CPU time.
    if torch._C._len_torch_dispatch_stack() and found.same_step_by_step(mesh):
        one_step = partial(
            of_shape(redistribute_by_steps, current_spec.shape),
            current_spec=current_spec,
            target_spec=target_spec,
            async_op=async_op,
            is_explicit=is_explicit,
        )
        return found.run(local_tensor, mesh, (one_step,))
    debug_mode = get_active_debug_mode()
    if debug_mode is None:
        return found.run(local_tensor, mesh)
    with debug_mode.record_redistribute_calls(
        local_tensor,
        current_spec.placements,
        target_spec.placements,
        found.text,
        is_explicit=is_explicit,
    ):
        return found.run(local_tensor, mesh)


def _check_complex(mesh: DeviceMesh, source: DTensorSpec, target: DTensorSpec) -> None:
    """Refuse what has no answer, as the all-reduce does. A reduce-scatter takes real
    and imaginary parts for numbers of their own.

    Raises:
        RuntimeError: a greatest or least complex number, or a product, is wanted from
            several ranks of the mesh.
    """
    if mesh.get_coordinate() is None:
        return
    for axis, (old, new) in enumerate(zip(source.placements, target.placements)):
        op = getattr(old, "reduce_op", None)
        if op in NOT_OF_COMPLEX and old != new and mesh.size(axis) > 1:
            raise RuntimeError(
                f"reduce_op {op} does not support complex tensors: a redistribution "
                f"from {source.placements} to "
                f"{target.placements} needs it over {mesh.size(axis)} ranks. Gather "
                "the terms as shards of a new dim, "
                "and reduce over that: DTensor.from_local(local[None], mesh, "
                "[Shard(0)]).full_tensor().prod(0)."
            )


class _Redistribute:
    """Never instantiated: its method is set on torch's autograd function of this
    name."""

    @classmethod
    def apply(
        cls,
        input: DTensor,
        device_mesh: DeviceMesh,
        placements: Any,
        async_op: bool,
        dtype_config: dict[str, Any],
    ) -> DTensor:
        """The redistributed DTensor; where there is nothing to differentiate, without a
        node of autograd."""
        if has_other_groups(input._spec.mesh, device_mesh):
            return lay_on(
                device_mesh,
                cls.apply(input, input._spec.mesh, placements, async_op, dtype_config),
            )
        made = None
        input = cast_in_order(input, dtype_config["op_dtype"])
        same_dtype = (
            dtype_config["op_dtype"]
            == dtype_config["out_dtype"]
            == input._local_tensor.dtype
        )
        if cls is torch_redistribute.Redistribute and same_dtype:
            made = without_node(input, device_mesh, placements, async_op)
        if made is not None:
            return made
        return super(torch_redistribute.Redistribute, cls).apply(  # type: ignore[misc]
            input, device_mesh, placements, async_op, dtype_config
        )


def has_other_groups(mesh: DeviceMesh, wanted: DeviceMesh) -> bool:
    """Whether a DTensor on this mesh, asked for on the other, must change its mesh, but
    not its ranks.

    Raises:
        NotImplementedError: the ranks are others, or lie otherwise.
    """
    if mesh is wanted:
        return False
    mesh, wanted = real_mesh(mesh), real_mesh(wanted)
    if mesh != wanted:
        raise NotImplementedError(
            f"Cross device mesh comm not supported yet! A DTensor on {mesh} was to be "
            f"redistributed to {wanted} where "
            "no numbers can be sent between meshes: in compiled code, for one, or "
            "with fake tensors. Redistribute it "
            "before, or in a function under torch.compiler.disable."
        )
    return not as_good_as(mesh, wanted)


class _LayOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: DTensor, mesh: DeviceMesh) -> Any:  # type: ignore
        ctx.mesh = given._spec.mesh
        spec = dataclasses.replace(given._spec, mesh=mesh)
        grad = given.requires_grad
        local = given._local_tensor
        return dtensor.DTensor(local, spec, requires_grad=grad)  # type: ignore

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:  # type: ignore
        return lay_on(ctx.mesh, grad), None


def lay_on(mesh: DeviceMesh, given: DTensor) -> DTensor:
    """The same on an equal mesh with other groups; a gradient comes back on the mesh
    that it was on."""
    return _LayOn.apply(given, mesh)  # type: ignore


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: DTensor, dtype: torch.dtype) -> Any:  # type: ignore
        ctx.dtype = given._local_tensor.dtype
        local, grad = given._local_tensor.to(dtype), given.requires_grad
        meta = TensorMeta(given.shape, given.stride(), dtype)
        spec = dataclasses.replace(given._spec, tensor_meta=meta)
        return dtensor.DTensor(local, spec, requires_grad=grad)  # type: ignore

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:  # type: ignore
        return _Cast.apply(grad, ctx.dtype), None  # type: ignore


def cast_in_order(given: DTensor, dtype: torch.dtype | None) -> DTensor:
    """The same in another type, if it has a shard order of its own: the step-by-step
    path, which casts by making a spec of placements alone, would forget it."""
    spec = given._spec
    if dtype in (None, given._local_tensor.dtype) or spec.is_default_device_order(
        spec.shard_order
    ):
        return given
    return _Cast.apply(given, dtype)  # type: ignore


def without_node(
    source: DTensor, device_mesh: DeviceMesh, placements: Any, async_op: bool
) -> DTensor | None:
    """The redistributed DTensor of the same type; None where autograd has a say, or for
    placements of other classes."""
    local, spec = source._local_tensor, source._spec
    kinds = tuple(map(type, (*spec.placements, *placements)))
    if not is_known(kinds) or _wants_node(source):
        return None
    target = other_spec(
        spec.tensor_meta, spec.placements, placements, kinds, device_mesh
    )
    if target is not None:
        given = local.dtype
        local = redistribute_local_tensor(
            local, spec, target, async_op=async_op, is_explicit=True
        )
        # of an average of whole numbers, where the step-by-step path divides
        if local.dtype != given:
            local = local.to(given)
        spec = target
    # As the local tensor does, or DTensor.__new__ warns; taken back below.
    asked = source.requires_grad and local.requires_grad
    # Its __init__ does nothing, slowly.
    made = dtensor.DTensor.__new__(dtensor.DTensor, local, spec, requires_grad=asked)
    if asked:
        made.requires_grad_(False)
    return made


def _wants_node(source: DTensor) -> bool:
    """Whether a gradient may be asked for, or something else looks at what autograd
    does: a transform, a tracer, a profiler."""
    local = source._local_tensor
    if type(source) is not dtensor.DTensor or type(local) is not torch.Tensor:
        return True
    # a frozen DTensor may hold a tensor that isn't
    differentiable = source.requires_grad or local.requires_grad
    # In inference mode the result keeps requires_grad.
    if differentiable and (
        torch.is_grad_enabled() or torch.is_inference_mode_enabled()
    ):
        return True
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    ):
        return True
    return torch.autograd._profiler_enabled() or forward_ad._current_level >= 0
