"""Redistribute the local tensor of a DTensor by a plan made for the whole change.

Start reading at `redistribute_local_tensor`: it finds the program for a change, or runs
the step-by-step path, which changes one mesh dim after the other. That path merges
collectives over several mesh dims only where the merged one gives the same shards, see
`_cuts_evenly`.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
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
from ._planner.regions import OPS
from ._runner.answers import Fallback, count_fallback, count_run, find_answer
from ._runner.program import tell_fallback
from ._runner.specs import are_known_classes, other_spec
from ._runner.waiting import watched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import Placement, Shard

redistribute_by_steps = original(torch_redistribute, "redistribute_local_tensor")
"""The step-by-step path: one mesh dim after the other, merged where that is exact."""


def _cuts_evenly(
    infos: list[torch_redistribute._TransformInfo],
    device_mesh: DeviceMesh,
    earlier: Sequence[torch_redistribute._TransformInfo],
    src_placements: Sequence[Placement],
    shape: Sequence[Any] | None,
) -> bool:
    """True if these all-gathers, or these reduce-scatters, may become one collective
    over all their mesh dims.

    They may if every shard boundary on the tensor dim, including those made by outer
    mesh dims, divides evenly. Only then does `torch.chunk` into as many pieces as all
    the mesh dims have ranks give the same pieces as `torch.chunk` by one mesh dim after
    the other: 6 rows are 2, 2, 2, 0 on four ranks, but 2, 1, 2, 1 on a 2 x 2 mesh.
    False also where a symbolic length doesn't tell, and for reduce-scatters beside
    strided shards.

    The global length decides, not the local one, so that all ranks run the same
    collectives. With 9 rows on 2 x 2 x 2, half of the ranks could merge the inner two
    gathers and the others could not.
    """
    source, target = infos[0].src_dst_placements
    dim = cast("Shard", target if source.is_partial() else source).dim
    placements, merged_axes = list(src_placements), {info.mesh_dim for info in infos}
    for info in earlier:
        placements[info.mesh_dim] = info.src_dst_placements[1]
    outer = [
        axis
        for axis, placement in enumerate(placements)
        if axis not in merged_axes and getattr(placement, "dim", None) == dim
    ]
    if source.is_partial() and any(
        isinstance(placement, _StridedShard)
        for placement in (target, *(placements[axis] for axis in outer))
    ):
        # The length may be a multiple of the pieces and the cut still be uneven: 8 rows
        # with split factor 3 over two ranks are 5 and 3.
        return False
    # Without the global shape the outer mesh dims don't count: a logical shape is
    # already cut by them.
    if shape is None:
        outer = []
        shape = max(
            [info.logical_shape for info in infos], key=lambda logical: logical[dim]
        )
    pieces = math.prod(device_mesh.size(axis) for axis in (*merged_axes, *outer))
    # False where a symbolic length doesn't tell: two collectives are right for every
    # length, the merged one isn't.
    return guard_or_false(shape[dim] % pieces == 0)


def redistribute_local_tensor(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    use_graph_based_transform: bool | None = None,
    is_explicit: bool = False,
) -> torch.Tensor:
    """Return the local tensor under `target_spec`, by the program for this change or
    else the step-by-step path. Every rank of the mesh must call it."""
    # Dynamo comes here in backward under compiled autograd. It can't trace a plan.
    if torch.compiler.is_dynamo_compiling():
        return _redistribute_untraced(
            local_tensor,
            current_spec,
            target_spec,
            async_op=async_op,
            use_graph_based_transform=use_graph_based_transform,
            is_explicit=is_explicit,
        )
    mesh = real_mesh(current_spec.mesh)
    answer = find_answer(
        mesh,
        local_tensor,
        current_spec,
        target_spec,
        async_op,
        use_graph_based_transform,
    )
    # Fake and traced tensors wait for nobody.
    is_real = type(local_tensor) is torch.Tensor
    with watched(current_spec, target_spec) if is_real else nullcontext():
        if isinstance(answer, Fallback):
            if local_tensor.is_complex():
                _check_complex(mesh, current_spec, target_spec)
            tell_fallback(answer.reason, current_spec, target_spec)
            count_fallback(answer.reason)  # overlay only
            return of_shape(redistribute_by_steps, current_spec.shape)(
                local_tensor,
                current_spec,
                target_spec,
                async_op=async_op,
                use_graph_based_transform=use_graph_based_transform,
                is_explicit=is_explicit,
            )
        count_run()  # overlay only
        # Under a dispatch mode (a tracer, CommDebugMode), a plan that is the one
        # collective of the step-by-step path runs by that path, so that the mode sees
        # the same operations. Without a mode that would take 2.4 times the CPU time.
        if torch._C._len_torch_dispatch_stack() and answer.same_step_by_step(mesh):
            one_step = partial(
                of_shape(redistribute_by_steps, current_spec.shape),
                current_spec=current_spec,
                target_spec=target_spec,
                async_op=async_op,
                is_explicit=is_explicit,
            )
            return answer.run(local_tensor, mesh, (one_step,))
        debug_mode = get_active_debug_mode()
        if debug_mode is None:
            return answer.run(local_tensor, mesh)
        with debug_mode.record_redistribute_calls(
            local_tensor,
            current_spec.placements,
            target_spec.placements,
            answer.text,
            is_explicit=is_explicit,
        ):
            return answer.run(local_tensor, mesh)


def _redistribute_untraced(*arguments: Any, **named: Any) -> torch.Tensor:
    """`redistribute_local_tensor`, before which dynamo breaks the graph."""
    return redistribute_local_tensor(*arguments, **named)


# What torch.compiler.disable() sets. Calling that would import all of dynamo here.
_redistribute_untraced._torchdynamo_disable = True  # type: ignore[attr-defined]


def _check_complex(mesh: DeviceMesh, source: DTensorSpec, target: DTensorSpec) -> None:
    """Raise if a redistribution of a complex tensor (unchecked) would reduce it by an
    operation that complex numbers don't have. All-reduce refuses these itself;
    reduce-scatter would reduce real and imaginary parts as separate numbers."""
    # A rank outside of the mesh reduces nothing.
    if mesh.get_coordinate() is None:
        return
    for axis, (placement, wanted) in enumerate(
        zip(source.placements, target.placements)
    ):
        op = getattr(placement, "reduce_op", None)
        refused = op in OPS and OPS[op].wrong_by_parts
        if refused and placement != wanted and mesh.size(axis) > 1:
            raise RuntimeError(
                f"reduce_op {op} does not support complex tensors: a redistribution "
                f"from {source.placements} to "
                f"{target.placements} needs it over {mesh.size(axis)} ranks. Gather "
                "the terms as shards of a new dim, "
                "and reduce over that: DTensor.from_local(local[None], mesh, "
                "[Shard(0)]).full_tensor().prod(0)."
            )


class _Redistribute:
    """Body of `Redistribute.apply`. It is never instantiated: `apply` is set on the
    autograd function of DTensor."""

    @classmethod
    def apply(
        cls,
        input: DTensor,
        device_mesh: DeviceMesh,
        placements: Any,
        async_op: bool,
        dtype_config: dict[str, Any],
    ) -> DTensor:
        """Return the redistributed DTensor, without an autograd node, which costs CPU
        time, where nothing can be differentiated. Every rank of the mesh must call
        it."""
        if has_other_groups(input._spec.mesh, device_mesh):
            return lay_on(
                device_mesh,
                cls.apply(input, input._spec.mesh, placements, async_op, dtype_config),
            )
        input = cast_in_order(input, dtype_config["op_dtype"])
        same_dtype = (
            dtype_config["op_dtype"]
            == dtype_config["out_dtype"]
            == input._local_tensor.dtype
        )
        # A subclass may have a forward of its own. A cast needs the node, which casts
        # the gradient back.
        if cls is torch_redistribute.Redistribute and same_dtype:
            result = without_node(input, device_mesh, placements, async_op)
            if result is not None:
                return result
        return super(torch_redistribute.Redistribute, cls).apply(  # type: ignore[misc]
            input, device_mesh, placements, async_op, dtype_config
        )


def has_other_groups(mesh: DeviceMesh, wanted: DeviceMesh) -> bool:
    """True if a DTensor on `mesh` has to change to `wanted`, an equal mesh with other
    process groups. No data moves."""
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
    """Replace the mesh of a DTensor by an equal one; backward puts the old one back."""

    @staticmethod
    def forward(ctx: Any, source: DTensor, mesh: DeviceMesh) -> Any:  # type: ignore
        ctx.mesh = source._spec.mesh
        spec = dataclasses.replace(source._spec, mesh=mesh)
        grad = source.requires_grad
        local = source._local_tensor
        return dtensor.DTensor(local, spec, requires_grad=grad)  # type: ignore

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:  # type: ignore
        return lay_on(ctx.mesh, grad), None


def lay_on(mesh: DeviceMesh, source: DTensor) -> DTensor:
    """Return the DTensor on an equal mesh (unchecked) with other groups. Its gradient
    comes back on the mesh of `source`."""
    return _LayOn.apply(source, mesh)  # type: ignore


class _Cast(torch.autograd.Function):
    """Cast a DTensor and keep its shard order; backward casts the gradient back."""

    @staticmethod
    def forward(ctx: Any, source: DTensor, dtype: torch.dtype) -> Any:  # type: ignore
        ctx.dtype = source._local_tensor.dtype
        local, grad = source._local_tensor.to(dtype), source.requires_grad
        meta = TensorMeta(source.shape, source.stride(), dtype)
        spec = dataclasses.replace(source._spec, tensor_meta=meta)
        return dtensor.DTensor(local, spec, requires_grad=grad)  # type: ignore

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:  # type: ignore
        return _Cast.apply(grad, ctx.dtype), None  # type: ignore


def cast_in_order(source: DTensor, dtype: torch.dtype | None) -> DTensor:
    """Cast a DTensor whose shard order isn't the default one; return any other as it
    is. The step-by-step path would make a spec with the default shard order for it, and
    the elements would end in the wrong places."""
    spec = source._spec
    if dtype in (None, source._local_tensor.dtype) or spec.is_default_device_order(
        spec.shard_order
    ):
        return source
    return _Cast.apply(source, dtype)  # type: ignore


def without_node(
    source: DTensor, device_mesh: DeviceMesh, placements: Any, async_op: bool
) -> DTensor | None:
    """Return the redistributed DTensor, of the same dtype and without an autograd node.
    None, and nothing is sent, if autograd or something that watches it needs the node,
    or if a placement is of an unknown class."""
    local, spec = source._local_tensor, source._spec
    kinds = tuple(map(type, (*spec.placements, *placements)))
    if not are_known_classes(kinds) or _wants_node(source):
        return None
    target = other_spec(
        spec.tensor_meta, spec.placements, placements, kinds, device_mesh
    )
    if target is not None:
        dtype = local.dtype
        local = redistribute_local_tensor(
            local, spec, target, async_op=async_op, is_explicit=True
        )
        # The mean of integers: the step-by-step path divides it and returns floats.
        if local.dtype != dtype:
            local = local.to(dtype)
        spec = target
    # DTensor.__new__ warns unless the DTensor and its local tensor agree. The result
    # needs no gradient, so this is taken back below.
    requires_grad = source.requires_grad and local.requires_grad
    # Not DTensor(...): its __init__ does nothing and takes time.
    result = dtensor.DTensor.__new__(
        dtensor.DTensor, local, spec, requires_grad=requires_grad
    )
    if requires_grad:
        result.requires_grad_(False)
    return result


def _wants_node(source: DTensor) -> bool:
    """True if autograd, a transform, a tracer or a profiler needs the node. Also for a
    subclass of DTensor, or a local tensor of a subclass of Tensor."""
    local = source._local_tensor
    if type(source) is not dtensor.DTensor or type(local) is not torch.Tensor:
        return True
    # A DTensor that needs no gradient may hold a local tensor that does.
    differentiable = source.requires_grad or local.requires_grad
    # In inference mode no gradient is computed, but the result has to keep
    # requires_grad, as it does from the node.
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
