# Owner(s): ["oncall: distributed"]
"""Sharding propagation may price what runs: the plan, and not the steps that it replaces."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed.tensor._planned_cost import planned_cost
from torch_overlay.distributed.tensor._planner.cost import Cost
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllToAll


class TestPlannedCost(TestCase):
    """On a mesh of 8 x 8 whose axes are flattened, in a world of 64 of which this process plays one."""

    BY_PLAN = {"plan_redistribution": True, "redistribute_cost": "plan"}

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("a", "b"))
        self.mesh._flatten("ab")

    def _cost(self, source, target, price=redistribute_cost) -> float:
        meta = TensorMeta(torch.Size((64, 64)), (64, 1), torch.float32)
        return price(*(DTensorSpec(self.mesh, end, tensor_meta=meta) for end in (source, target)))

    def test_a_move_over_two_axes_costs_what_one_collective_costs(self) -> None:
        rows, replicas = (Regions.of((dim, dim), (None, None), (64, 64), (8, 8)) for dim in (0, None))
        gather = 1e6 * Cost.of(None, None).seconds(AllGather(rows, replicas, (0, 1)), itemsize=4)
        ends = (Shard(0), Shard(0)), (Replicate(), Replicate())
        self.assertNotEqual(self._cost(*ends), gather)
        with config.patch(**self.BY_PLAN):
            self.assertEqual(self._cost(*ends), gather)

    def test_what_stays_costs_nothing(self) -> None:
        with config.patch(**self.BY_PLAN):
            self.assertEqual(self._cost((Shard(0), Replicate()), (Shard(0), Replicate()), planned_cost), 0)
            self.assertEqual(self._cost((Replicate(), Replicate()), (Replicate(), Shard(1)), planned_cost), 0)

    def test_shards_that_become_terms_cost_what_they_did(self) -> None:
        ends = (Shard(0), Replicate()), (Partial(), Replicate())
        before = self._cost(*ends)
        with config.patch(**self.BY_PLAN):
            self.assertIsNone(self._cost(*ends, planned_cost))
            self.assertEqual(self._cost(*ends), before)

    def test_each_round_has_its_latency(self) -> None:
        before, after = (Regions.of(dims, (None, None), (64, 64), (8, 8)) for dims in ((0, 0), (1, 1)))
        one, two = (Cost().seconds(AllToAll(before, after, (0, 1), rounds=rounds), 4) for rounds in (1, 2))
        self.assertEqual(two - one, Cost().latency * (1 + 6) / 2)

    def test_by_default_the_steps_are_priced(self) -> None:
        before = self._cost((Partial(), Shard(0)), (Replicate(), Replicate()))
        with config.patch(plan_redistribution=True):
            self.assertEqual(self._cost((Partial(), Shard(0)), (Replicate(), Replicate())), before)


if __name__ == "__main__":
    run_tests()
