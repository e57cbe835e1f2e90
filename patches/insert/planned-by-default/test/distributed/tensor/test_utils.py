"""What counts the all-gather of the step-by-step path."""

import torch.distributed as dist


class Test2DStridedLocalShard:
    @dist.config.patch(plan_redistribution=False)
    def test_fsdp1_tp_2d_dtensor_local_shards_and_offsets(): ...
