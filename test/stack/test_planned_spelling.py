# Owner(s): ["oncall: distributed"]
"""What is sent by a single step and what becomes of it, where it has a spelling that compilers know."""

import torch
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._pack import part
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllGather
from torch_overlay.distributed.tensor._spelling import gathered


class TestSpelling(TestCase):
    """A gather along dim 0 of what three ranks send is what the collective does; no process group."""

    @parametrize("dim", [0, 1])
    @parametrize("length", [6, 7, 2])
    def test_a_gather_puts_shards_together(self, dim, length) -> None:
        shape = (length, 4) if dim == 0 else (4, length)
        whole = torch.arange(4 * length).reshape(shape)
        before, after = (Regions.of((d,), (None,), shape, (3,)) for d in (dim, None))
        step, boxes = AllGather(before, after, (0,)), [before.box((rank,)) for rank in range(3)]
        spellings = [gathered(step, box, after.box((0,))) for box in boxes]
        arrived = torch.cat([pack(part(whole, box)) for (pack, _), box in zip(spellings, boxes)])
        for _, land in spellings:
            self.assertEqual(land(arrived) if land else arrived, whole)


instantiate_parametrized_tests(TestSpelling)

if __name__ == "__main__":
    run_tests()
