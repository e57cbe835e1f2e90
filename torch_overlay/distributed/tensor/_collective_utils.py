"""Body that replaces a function of ``torch.distributed.tensor._collective_utils``, named as what it replaces."""

from __future__ import annotations

import types
from functools import lru_cache
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _collective_utils as torch_utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .._settings import Settings, get_settings
from ._joint_groups import groups_known
from ._redistribute import cost_of, not_ours, plan_between
from ._regions import NotOurs
from ._specs import norm_ended

_stock = torch_utils.redistribute_cost
# Torch's own body under another name, as in `_redistribute`.
stock_redistribute_cost = types.FunctionType(
    _stock.__code__, _stock.__globals__, _stock.__name__, _stock.__defaults__, _stock.__closure__
)


def redistribute_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float:
    """Microseconds on the wire: torch's estimate, or with ``options.cost = "plan"`` that of the plan that will run."""
    settings = get_settings()
    if settings.cost == "plan" and current_spec.tensor_meta is not None:
        mesh = getattr(current_spec.mesh, "real_obj", current_spec.mesh)
        if not_ours(mesh, current_spec, target_spec) is None:
            cost = _cost(mesh, current_spec, target_spec, groups_known(mesh), settings)
            if cost is not None:
                return cost
    return stock_redistribute_cost(current_spec, target_spec)


@lru_cache(maxsize=4096)
def _cost(mesh: DeviceMesh, source: DTensorSpec, target: DTensorSpec, known: Any, settings: Settings) -> float | None:
    itemsize = source.tensor_meta.dtype.itemsize
    try:
        norm_ended(source, target)
        steps = plan_between(mesh, source, target, itemsize)[2]
    except NotOurs:
        return None
    return 1e6 * sum(cost_of(mesh, settings).seconds(step, itemsize) for step in steps)


def forget_costs(_: Any = None) -> None:
    """Empty the cache of costs."""
    _cost.cache_clear()
