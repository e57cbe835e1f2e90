# Owner(s): ["oncall: distributed"]
"""Answers are remembered with the mesh that they are about, and say why there is no plan."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed.tensor._answers import Answer, Fallback, find_answer


class TestAnswers(TestCase):
    """On a 2 x 2 mesh, in a world of 4 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        self.addCleanup(dist.destroy_process_group)
        planned = config.patch(plan_redistribution=True)
        planned.__enter__()
        self.addCleanup(planned.__exit__, None, None, None)
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def _ask(self, mesh: DeviceMesh, length: int = 2, source=(Shard(0), Shard(0))) -> Answer:
        meta = TensorMeta(torch.Size((8, 8)), (8, 1), torch.float32)
        specs = [DTensorSpec(mesh, end, tensor_meta=meta) for end in (source, (Replicate(), Replicate()))]
        return find_answer(mesh, torch.ones(length, 8), *specs, False, None)

    def test_a_question_is_planned_once(self) -> None:
        rows = self._ask(self.mesh)
        self.assertIs(rows, self._ask(copy.copy(self.mesh)))
        replicated = self._ask(self.mesh, 4, (Shard(0), Replicate()))
        self.assertIsNot(replicated, rows)
        self.assertIs(self._ask(self.mesh), rows)

    def test_what_is_not_planned_says_why(self) -> None:
        class Other(Partial):
            pass

        answer = self._ask(self.mesh, 8, (Other("sum"), Replicate()))
        self.assertEqual(answer, Fallback("a placement of the class Other"))


if __name__ == "__main__":
    run_tests()
