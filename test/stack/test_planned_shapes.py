# Owner(s): ["oncall: distributed"]
"""A local tensor of another shape than its spec says is an error, unless the step-by-step path pads it."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed.tensor._answers import Answer, Fallback, find_answer
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllGather
from torch_overlay.distributed.tensor._question import Question
from torch_overlay.distributed.tensor._spelling import pads_step_by_step


class TestShapes(TestCase):
    """On a mesh of 4, in a world of 4 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        self.addCleanup(dist.destroy_process_group)
        planned = config.patch(plan_redistribution=True)
        planned.__enter__()
        self.addCleanup(planned.__exit__, None, None, None)
        self.mesh = init_device_mesh("cpu", (4,))

    def _ask(self, rows: int, local: torch.Tensor, target=Replicate()) -> Answer:
        meta = TensorMeta(torch.Size((rows, 8)), (8, 1), torch.float32)
        specs = [DTensorSpec(self.mesh, (end,), tensor_meta=meta) for end in (Shard(0), target)]
        return find_answer(self.mesh, local, *specs, False, None)

    def test_another_shape_than_the_spec_says_is_an_error(self) -> None:
        with self.assertRaisesRegex(ValueError, r"shape \(2, 8\) is expected at \(0,\).*Nothing was sent"):
            self._ask(8, torch.ones(3, 8))

    def test_what_the_others_pad_is_none(self) -> None:
        expected = Fallback("a local tensor of another shape than its spec says")
        self.assertEqual(self._ask(7, torch.ones(1, 8)), expected)
        with self.assertRaisesRegex(ValueError, "Nothing was sent"):
            self._ask(7, torch.ones(3, 8))

    def test_where_nothing_is_sent_it_is_none(self) -> None:
        expected = Fallback("a local tensor of another shape than its spec says")
        self.assertEqual(self._ask(8, torch.ones(3, 8), Shard(0)), expected)

    def test_uneven_shards_are_padded_step_by_step(self) -> None:
        ends = (Shard(0),), (Replicate(),)
        asked = Question(None, *ends, (Shard, Replicate), (), (), (7, 4), torch.float32)
        for length, shape, padded in ((7, (2, 4), True), (7, (4, 4), False), (7, (2, 5), False), (6, (1, 4), False)):
            rows, replicas = (Regions.of((dim,), (None,), (length, 4), (3,)) for dim in (0, None))
            step, held = AllGather(rows, replicas, (0,)), rows.box((0,)).length
            self.assertEqual(pads_step_by_step([step], asked, held, shape), padded, msg=f"{length}, {shape}")
            as_bytes = asked._replace(dtype=torch.int16)
            self.assertFalse(pads_step_by_step([step], as_bytes, held, shape), msg="the others send bytes")


if __name__ == "__main__":
    run_tests()
