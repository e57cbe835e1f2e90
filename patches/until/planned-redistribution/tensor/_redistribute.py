"""Before redistributions are planned: torch's own way, with its merging only where that is exact."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import _redistribute as torch_redistribute

from .._kept import keep
from ._safe_merging import cuts_evenly

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

merge_transform_infos = keep(torch_redistribute._optimize_transform_infos)


def _optimize_transform_infos(
    transform_infos: list[Any], device_mesh: DeviceMesh, src_placements: Any, dst_placements: Any
) -> list[Any]:
    """The steps, with consecutive ones of a kind merged where all of them cut evenly."""
    steps: list[Any] = []
    for evenly, run in itertools.groupby(transform_infos, lambda info: cuts_evenly(info, device_mesh)):
        infos = list(run)
        steps += merge_transform_infos(infos, device_mesh, src_placements, dst_placements) if evenly else infos
    return steps
