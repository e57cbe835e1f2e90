"""Upstream the choice is in torch.distributed.config; sharding propagation asks for each candidate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import config

from .._settings import get_settings

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def redistribute_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float:
    """Microseconds on the wire."""
    # All choices are read only where this one isn't the default: that takes longer than a price.
    if config.redistribute_cost != "steps" and get_settings().cost == "plan":
        # The planner needs placements, and they need this module.
        from ._planned_cost import planned_cost

        cost = planned_cost(current_spec, target_spec)
        if cost is not None:
            return cost
    return redistribute_cost_by_steps(current_spec, target_spec)
