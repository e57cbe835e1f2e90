# Owner(s): ["oncall: distributed"]
"""Which plans the step-by-step path runs just so."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllReduce, AllToAll, ReduceScatter
from torch_overlay.distributed.tensor._program import make_program
from torch_overlay.distributed.tensor._question import Question
from torch_overlay.distributed.tensor._spelling import same_step_by_step


class TestSameSteps(TestCase):
    """No bytes move."""

    def _asked(self, source: Placement, target: Placement, dtype=torch.float32) -> Question:
        return Question(None, (source,), (target,), (type(source), type(target)), (), (), (6, 6), dtype)

    def test_one_collective_over_one_even_dim_is_the_same_step_by_step(self) -> None:
        rows, columns, replicas = (Regions.of((dim,), (None,), (6, 6), (3,)) for dim in (0, 1, None))
        pending = Regions.of((None,), ("sum",), (6, 6), (3,))
        for step, source, target, on_cpu in (
            (AllGather(rows, replicas, (0,)), Shard(0), Replicate(), True),
            (AllReduce(pending, replicas, (0,), "sum"), Partial(), Replicate(), True),
            (ReduceScatter(pending, columns, (0,), "sum"), Partial(), Shard(1), True),
            (AllToAll(rows, columns, (0,)), Shard(0), Shard(1), False),
        ):
            asked = self._asked(source, target)
            self.assertEqual(same_step_by_step([step], asked, "cpu"), on_cpu, msg=f"{step}")
            self.assertTrue(same_step_by_step([step], asked, "cuda"), msg=f"{step}")
            self.assertFalse(same_step_by_step([step, step], asked, "cuda"))
        self.assertFalse(
            same_step_by_step([AllGather(rows, replicas, (0,))], self._asked(Shard(0), Replicate(), torch.int16), "cpu")
        )

    def test_uneven_shards_are_not(self) -> None:
        rows, replicas = (Regions.of((dim,), (None,), (7, 4), (3,)) for dim in (0, None))
        asked = self._asked(Shard(0), Replicate())
        self.assertFalse(same_step_by_step([AllGather(rows, replicas, (0,))], asked, "cuda"))

    def test_a_program_does_it_by_the_functions_given(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
        self.addCleanup(dist.destroy_process_group)
        mesh = init_device_mesh("cpu", (3,))
        meta = TensorMeta(torch.Size((6, 6)), (6, 1), torch.float32)
        specs = [DTensorSpec(mesh, (end,), tensor_meta=meta) for end in (Shard(0), Replicate())]
        program = make_program(Question.of(mesh, *specs, (6, 6), torch.float32), mesh)
        program.make_ready(mesh)
        self.assertTrue(program.same_step_by_step(mesh))
        self.assertEqual(program.run(torch.ones(2, 6), mesh, (torch.neg,)), -torch.ones(2, 6))


if __name__ == "__main__":
    run_tests()
