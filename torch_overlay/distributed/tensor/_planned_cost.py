"""What the plan of a redistribution costs, for sharding propagation, which asks the same over and over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._mesh_groups import joint_groups_known
from .._mesh_state import shared_state, view_of
from .._settings import get_settings
from .._shared_state import states
from ._pair import Pair
from ._planned import not_ours
from ._planner.regions import NotOurs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

KEPT = 4096  # costs of the meshes of one universe


def planned_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float | None:
    """Microseconds on the wire of the plan that will run; None where torch's own path will."""
    if current_spec.tensor_meta is None:
        return None
    mesh = getattr(current_spec.mesh, "real_obj", current_spec.mesh)
    if not_ours(mesh, current_spec, target_spec) is not None:
        return None
    kinds = tuple(map(type, (*current_spec.placements, *target_spec.placements)))
    costs = shared_state(mesh).remembered["costs"]
    own = tuple(mesh._dim_group_names)
    ends = tuple((spec.placements, spec.shard_order, spec.tensor_meta) for spec in (current_spec, target_spec))
    key = (view_of(mesh), own, ends, kinds, joint_groups_known(mesh), get_settings())
    if key not in costs:
        if len(costs) >= KEPT:
            costs.clear()
        costs[key] = _cost(mesh, current_spec, target_spec)
    return costs[key]


def _cost(mesh: DeviceMesh, source: DTensorSpec, target: DTensorSpec) -> float | None:
    dtype = source.tensor_meta.dtype
    try:
        pair = Pair.of(mesh, source, target)
        steps = pair.plan(tuple(source.shape), dtype)[2]
    except NotOurs:
        return None
    return 1e6 * sum(pair.cost.seconds(step, dtype.itemsize) for step in steps)


def forget_costs(_: Any = None) -> None:
    """Forget them."""
    for shared in list(states):
        shared.remembered.pop("costs", None)
