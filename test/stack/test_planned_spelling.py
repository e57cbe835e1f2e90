# Owner(s): ["oncall: distributed"]
"""What is sent by a single step and what becomes of it, where it has a spelling that compilers know."""

import torch
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllGather, ReduceScatter
from torch_overlay.distributed.tensor._spelling import gathered, scattered


def cut(tensor, box):
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


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
        arrived = torch.cat([pack(cut(whole, box)) for (pack, _), box in zip(spellings, boxes)])
        for _, land in spellings:
            self.assertEqual(land(arrived) if land else arrived, whole)

    @parametrize("dim", [0, 1])
    def test_a_scatter_leaves_parts_in_a_row(self, dim) -> None:
        whole = torch.arange(36).reshape(6, 6)
        before, after = Regions.of((None,), ("sum",), (6, 6), (3,)), Regions.of((dim,), (None,), (6, 6), (3,))
        step = ReduceScatter(before, after, (0,), "sum")
        for rank in range(3):
            pack = scattered(step, before.box((0,)), after.box((rank,)))
            self.assertEqual(pack(whole).chunk(3)[rank], cut(whole, after.box((rank,))))

    def test_uneven_parts_have_no_spelling(self) -> None:
        before, after = Regions.of((None,), ("sum",), (7, 6), (3,)), Regions.of((0,), (None,), (7, 6), (3,))
        step = ReduceScatter(before, after, (0,), "sum")
        self.assertIsNone(scattered(step, before.box((0,)), after.box((0,))))


instantiate_parametrized_tests(TestSpelling)

if __name__ == "__main__":
    run_tests()
