"""Which consecutive steps of torch's own redistribution are merged to one collective.

Torch's function decides for each run of like steps, and here its answer is corrected: it merges over uneven shards and
over meshes whose ranks don't ascend, which gives wrong values. Upstream this is a few lines inside that function.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import _redistribute as torch_redistribute
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from ..distributed._mesh.caches import real_mesh
from ..distributed._mesh.state import view_of
from ..distributed._torch import moved_shape, original
from ..distributed.tensor._redistribute import _cuts_evenly

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

merge_transform_infos = original(torch_redistribute, "_optimize_transform_infos")


def _optimize_transform_infos(
    transform_infos: list[Any], device_mesh: DeviceMesh, src_placements: Any, dst_placements: Any
) -> list[Any]:
    """As torch's, but consecutive steps of one kind are merged only if that gives the same shards and ranks ascend."""
    mesh, in_order = real_mesh(device_mesh), _in_rank_order(real_mesh(device_mesh))
    steps: list[Any] = []
    count = 0
    for _, run in itertools.groupby(transform_infos, _kind):
        infos, earlier = list(run), transform_infos[:count]
        count += len(infos)
        even = True
        if len(infos) > 1 and infos[0]._comm_type_key() in ("all_gather", "reduce_scatter"):
            # Torch raises where gathers of strided shards are merged. One by one they wouldn't raise, but its greedy
            # planner would return other rows.
            strided = isinstance(infos[0].src_dst_placements[0], _StridedShard)
            even = strided or _cuts_evenly(infos, device_mesh, earlier, src_placements, moved_shape.get())
        if not even:
            _warn_of_uneven_cuts(mesh, infos, src_placements, dst_placements)
        if not even or not in_order:
            # 5 elements on 2 x 2 are cut 3, 2 and then 2, 1, 1, 1: gathered at once they come back as 0 1 2 0 3.
            steps += infos
        else:
            merged = merge_transform_infos(infos, device_mesh, src_placements, dst_placements)
            steps += [_as_sum(step, infos) for step in merged]
    return steps


def _kind(info: Any) -> tuple[Any, Any]:
    """What consecutive transforms must have in common to be merged."""
    source, target = info.src_dst_placements
    averages = type(source) is Partial and source.reduce_op == "avg"
    return Partial("sum") if averages else source, target


def _as_sum(step: Any, infos: list[Any]) -> Any:
    """Make a step that was merged from averages and sums a sum. Torch leaves it an average if only axes of one rank
    average."""
    sources = {info.src_dst_placements[0] for info in infos}
    if len(sources) < 2 or not hasattr(step, "avg_scale"):
        return step
    return dataclasses.replace(step, src_dst_placements=(Partial("sum"), step.src_dst_placements[1]))


def _warn_of_uneven_cuts(mesh: DeviceMesh, infos: list[Any], source: Any, target: Any) -> None:
    """Give torch's warning about steps that aren't merged since a cut is uneven, if there is a mesh to merge over."""
    dims = tuple(sorted(info.mesh_dim for info in infos))
    if torch_redistribute._get_flattened_mesh_by_layout(mesh, dims) is not None:
        torch_redistribute._warn_flatten_optimization_not_possible(
            mesh, dims, source, target, len(infos), infos[0]._comm_type_key(), "uneven_tensor_shape"
        )


def _in_rank_order(mesh: DeviceMesh) -> bool:
    """True if the ranks of every copy of the mesh ascend: torch sorts those of the group of a flattened view."""
    view = view_of(mesh)
    return view.layout.collapse().check_sorted() and view.rank_map.ascends
