"""Whose text has the collectives of the step-by-step path."""

import torch.distributed as dist


class TestDTensorDebugMode:
    @dist.config.patch(plan_redistribution=False)
    def test_debug_mode_densor_redistribution_trace(): ...
