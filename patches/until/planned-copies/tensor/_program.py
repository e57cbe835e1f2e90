"""Before results are kept apart where the step-by-step path gathers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._planner.steps import Narrow

if TYPE_CHECKING:
    from ._pack import Local


class Program(...):
    def _last_copy(self) -> Local | None:
        """What makes the result a tensor of its own where the plan ends in a view of something bigger; else None.

        Where nothing else happens, the step-by-step path cuts into a copy with the same order of strides.
        """
        is_view = {*map(type, self.steps)} <= {Narrow}
        if not self.steps or not isinstance(self.steps[-1], Narrow):
            return None
        return torch.Tensor.clone if is_view else _copied
