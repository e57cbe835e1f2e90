# Owner(s): ["oncall: distributed"]
"""A question is all that a plan depends on, and there are reasons not to ask it."""

from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed.tensor._question import Question, why_not


class Other(Partial):
    """Equal to Partial(), and perhaps something else."""


class TestQuestion(TestCase):
    """In a world of 4 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (4,))

    def _question(self, source, shape=(8, 8), dtype=torch.float32, async_op=False) -> Question:
        specs = (DTensorSpec(self.mesh, (end,)) for end in (source, Replicate()))
        return Question.of(self.mesh, *specs, shape, dtype, async_op)

    def test_what_differs_is_another_question(self) -> None:
        asked = self._question(Partial())
        again = self._question(Partial())
        self.assertEqual((asked, hash(asked), asked.sizes), (again, hash(again), (4,)))
        others = (
            self._question(Shard(0)),
            self._question(Other()),
            self._question(Partial(), shape=(8, 4)),
            self._question(Partial(), dtype=torch.float64),
            self._question(Partial(), async_op=True),
        )
        self.assertNotIn(asked, others)

    def test_why_none_is_asked(self) -> None:
        source, target = (DTensorSpec(self.mesh, (end,)) for end in (Shard(0), Replicate()))
        other = DTensorSpec(init_device_mesh("cpu", (2,)), (Replicate(),))
        with config.patch(plan_redistribution=True):
            self.assertIsNone(why_not(self.mesh, source, target))
            for forced in (True, False):
                asked = "an algorithm for the steps was asked for"
                self.assertEqual(why_not(self.mesh, source, target, forced), asked)
                with mock.patch.object(_redistribute, "_FORCE_MIN_COST_REDISTRIBUTION_PLAN", forced):
                    self.assertEqual(why_not(self.mesh, source, target), asked)
            self.assertEqual(why_not(self.mesh, source, other), "another mesh")


if __name__ == "__main__":
    run_tests()
