"""What the plan of a redistribution costs, for sharding propagation, which asks the same over and over."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .._settings import Settings, get_settings
from ._joint_groups import groups_known
from ._pair import Pair
from ._planned import not_ours
from ._regions import NotOurs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def planned_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float | None:
    """Microseconds on the wire of the plan that will run; None where torch's own path will."""
    if current_spec.tensor_meta is None:
        return None
    mesh = getattr(current_spec.mesh, "real_obj", current_spec.mesh)
    if not_ours(mesh, current_spec, target_spec) is not None:
        return None
    kinds = tuple(map(type, (*current_spec.placements, *target_spec.placements)))
    return _cost(mesh, current_spec, target_spec, kinds, groups_known(mesh), get_settings())


@lru_cache(maxsize=4096)
def _cost(
    mesh: DeviceMesh,
    source: DTensorSpec,
    target: DTensorSpec,
    kinds: tuple[type, ...],  # a subclass may call itself equal
    known: Any,
    settings: Settings,
) -> float | None:
    dtype = source.tensor_meta.dtype
    try:
        pair = Pair.of(mesh, source, target)
        steps = pair.plan(tuple(source.shape), dtype)[2]
    except NotOurs:
        return None
    return 1e6 * sum(pair.cost.seconds(step, dtype.itemsize) for step in steps)


def forget_costs(_: Any = None) -> None:
    """Empty the cache of costs."""
    _cost.cache_clear()
