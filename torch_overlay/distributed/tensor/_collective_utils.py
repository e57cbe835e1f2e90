"""Body that replaces a function of ``torch.distributed.tensor._collective_utils``, named as what it replaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import _collective_utils as torch_utils

from .. import config
from .._groups.settings import get_settings
from .._torch_originals import original

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

redistribute_cost_by_steps = original(torch_utils, "redistribute_cost")
"""What the step-by-step path costs, one step after the other."""


def redistribute_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float:
    """Microseconds on the wire: of the steps one by one, or where redistribute_cost is "plan" of the plan that runs."""
    # All choices are read only where this one isn't the default: that takes longer than a price.
    if config.redistribute_cost != "steps" and get_settings().redistribute_cost == "plan":
        # The planner needs placements, and they need this module.
        from ._plans.answers import planned_cost

        cost = planned_cost(current_spec, target_spec)
        if cost is not None:
            return cost
    return redistribute_cost_by_steps(current_spec, target_spec)
