"""Redistribute a local tensor by one plan; the body that replaces torch's, and the way back to torch's own.

What can't be planned runs step by step, with collectives merged only where that is exact.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed.tensor._api as dtensor
from torch.autograd import forward_ad
from torch.distributed.tensor import _redistribute as torch_redistribute
from torch.distributed.tensor.placement_types import Shard, _StridedShard
from torch.fx.experimental.symbolic_shapes import guard_or_false

from .._kept import keep
from .._mesh_state import view_of
from .._mesh_traced import real_mesh
from .._torch_debug_mode import get_active_debug_mode  # overlay only
from ._answers import Fallback, count_fallback, count_run, find_answer
from ._target_spec import is_known, other_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

redistribute_by_steps = keep(torch_redistribute, "redistribute_local_tensor")
"""One mesh dim after the other, merged where that is exact."""
merge_transform_infos = keep(torch_redistribute, "_optimize_transform_infos")


def _optimize_transform_infos(
    transform_infos: list[Any], device_mesh: DeviceMesh, src_placements: Any, dst_placements: Any
) -> list[Any]:
    """Torch's steps, with consecutive ones of a kind merged where that is exact.

    Torch merges averages with sums and divides afterwards, and then a whole number isn't one any more.
    """
    in_order = _in_rank_order(real_mesh(device_mesh))
    steps: list[Any] = []
    count = 0
    for _, run in itertools.groupby(transform_infos, lambda info: info.src_dst_placements):
        infos, earlier = list(run), transform_infos[:count]
        count += len(infos)
        merge = len(infos) > 1
        if merge and infos[0]._comm_type_key() in ("all_gather", "reduce_scatter"):
            # Merged gathers of strided shards stay an error; one by one, torch's greedy planner gives other rows.
            strided = isinstance(infos[0].src_dst_placements[0], _StridedShard)
            merge = in_order and (strided or _cuts_evenly(infos, device_mesh, earlier))
        steps += merge_transform_infos(infos, device_mesh, src_placements, dst_placements) if merge else infos
    return steps


def _cuts_evenly(
    infos: list[torch_redistribute._TransformInfo],
    device_mesh: DeviceMesh,
    earlier: Sequence[torch_redistribute._TransformInfo],
) -> bool:
    """Whether every cut is even that these all-gathers undo, or these reduce-scatters make.

    Only then is torch.chunk by all their mesh dims at once sure to be torch.chunk by one
    after the other: 6 rows are 2, 2, 2, 0 on four ranks, and 2, 1, 2, 1 on a 2 x 2 mesh.

    For a reduce-scatter, cuts of the same dim by `earlier` transforms of the plan count,
    too: the greedy planner leaves them out of the logical shapes. In R, P, P to S(0),
    S(0), S(0) on 2 x 2 x 2 all three have the length of the whole tensor.
    """
    source, target = infos[0].src_dst_placements
    if source.is_partial():
        dim = cast("Shard", target).dim
        outermost_first = [
            info for info in (*earlier, *infos) if getattr(info.src_dst_placements[1], "dim", None) == dim
        ]
        if any(isinstance(info.src_dst_placements[1], _StridedShard) for info in outermost_first):
            # uneven though the length may be divided by the parts: 8 rows with split factor 3 are 5 and 3
            return False
    else:
        dim, outermost_first = cast("Shard", source).dim, infos[::-1]
    parts = math.prod(device_mesh.size(info.mesh_dim) for info in outermost_first)
    return guard_or_false(outermost_first[0].logical_shape[dim] % parts == 0)


def _in_rank_order(mesh: DeviceMesh) -> bool:
    """Whether the ranks of every copy of the mesh ascend row-major. Then its flattened views have the mesh's order,
    torch's too, which sorts the ranks of groups."""
    view = view_of(mesh)
    return view.layout.collapse().check_sorted() and view.rank_map.ascends


def redistribute_local_tensor(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    use_graph_based_transform: bool | None = None,
    is_explicit: bool = False,
) -> torch.Tensor:
    """What this rank holds of the tensor under the target spec, from what it holds under the current one."""
    mesh = real_mesh(current_spec.mesh)
    found = find_answer(mesh, local_tensor, current_spec, target_spec, async_op, use_graph_based_transform)
    if isinstance(found, Fallback):
        count_fallback(found.reason)  # overlay only
        return redistribute_by_steps(
            local_tensor,
            current_spec,
            target_spec,
            async_op=async_op,
            use_graph_based_transform=use_graph_based_transform,
            is_explicit=is_explicit,
        )
    count_run()  # overlay only
    # Under a dispatch mode (a tracer, CommDebugMode), a plan that is the one collective of the step-by-step path runs
    # by that path, so that the mode sees the same operations.
    if torch._C._len_torch_dispatch_stack() and found.same_step_by_step(mesh):
        one_step = partial(
            redistribute_by_steps,
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
        local_tensor, current_spec.placements, target_spec.placements, found.text, is_explicit=is_explicit
    ):
        return found.run(local_tensor, mesh)


class _Redistribute:
    """Never instantiated: its method is set on torch's autograd function of this name."""

    @classmethod
    def apply(
        cls, input: DTensor, device_mesh: DeviceMesh, placements: Any, async_op: bool, dtype_config: dict[str, Any]
    ) -> DTensor:
        """The redistributed DTensor; where there is nothing to differentiate, without a node of autograd."""
        made = None
        same_dtype = dtype_config["op_dtype"] == dtype_config["out_dtype"] == input._local_tensor.dtype
        if cls is torch_redistribute.Redistribute and same_dtype:
            made = without_node(input, device_mesh, placements, async_op)
        if made is not None:
            return made
        return super(torch_redistribute.Redistribute, cls).apply(  # type: ignore[misc]
            input, device_mesh, placements, async_op, dtype_config
        )


def without_node(source: DTensor, device_mesh: DeviceMesh, placements: Any, async_op: bool) -> DTensor | None:
    """The redistributed DTensor of the same type; None where autograd has a say, or for placements of other classes."""
    local, spec = source._local_tensor, source._spec
    kinds = tuple(map(type, (*spec.placements, *placements)))
    if not is_known(kinds) or _wants_node(source):
        return None
    target = other_spec(spec.tensor_meta, spec.placements, placements, kinds, device_mesh)
    if target is not None:
        local = redistribute_local_tensor(local, spec, target, async_op=async_op, is_explicit=True)
        spec = target
    # As the local tensor does, or DTensor.__new__ warns; taken back below.
    asked = source.requires_grad and local.requires_grad
    # Its __init__ does nothing, slowly.
    made = dtensor.DTensor.__new__(dtensor.DTensor, local, spec, requires_grad=asked)
    if asked:
        made.requires_grad_(False)
    return made


def _wants_node(source: DTensor) -> bool:
    """Whether a gradient may be asked for, or something else looks at what autograd does: a transform, a tracer, a
    profiler."""
    local = source._local_tensor
    if type(source) is not dtensor.DTensor or type(local) is not torch.Tensor:
        return True
    differentiable = source.requires_grad or local.requires_grad  # a frozen DTensor may hold a tensor that isn't
    # In inference mode the result keeps requires_grad.
    if differentiable and (torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
        return True
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return True
    return torch.autograd._profiler_enabled() or forward_ad._current_level >= 0
