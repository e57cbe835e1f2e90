"""What holds a redistribution to the collectives of the step-by-step path runs that."""

import torch.distributed as dist


class MultiDimRedistributeTest:
    @dist.config.patch(plan_redistribution=False)
    def test_redistribute_shard_dim_multi_dim_mesh(): ...


class MultiDimRedistributeOptimizationTest:
    @dist.config.patch(plan_redistribution=False)
    def test_multi_dim_redistribute(): ...


class FlattenedReductionIntegrationTest:
    @dist.config.patch(plan_redistribution=False)
    def test_merging_reductions(): ...
