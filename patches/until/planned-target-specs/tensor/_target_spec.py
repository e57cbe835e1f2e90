"""Before specs are remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor._dtensor_spec import DTensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import TensorMeta
    from torch.distributed.tensor.placement_types import Placement


def other_spec(
    meta: TensorMeta | None,
    source: tuple[Placement, ...],
    target: Sequence[Placement],
    kinds: tuple[type, ...],
    mesh: DeviceMesh,
) -> DTensorSpec | None:
    """What a tensor is to become, of known placements; None where it is that already."""
    target = tuple(target)
    if source == target and kinds[: len(target)] == kinds[len(target) :]:
        return None
    return DTensorSpec(mesh, target, tensor_meta=meta)
