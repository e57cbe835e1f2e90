# Owner(s): ["oncall: distributed"]
"""What is sent by a single step and what becomes of it, where it has a spelling that compilers know."""

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllReduce, AllToAll, ReduceScatter
from torch_overlay.distributed.tensor._question import Question
from torch_overlay.distributed.tensor._spelling import (
    gathered,
    pads_step_by_step,
    same_step_by_step,
    scattered,
)


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

    def test_uneven_shards_are_padded_step_by_step(self) -> None:
        asked = self._asked(Shard(0), Replicate())
        for length, shape, padded in ((7, (2, 4), True), (7, (4, 4), False), (7, (2, 5), False), (6, (1, 4), False)):
            rows, replicas = (Regions.of((dim,), (None,), (length, 4), (3,)) for dim in (0, None))
            step, held = AllGather(rows, replicas, (0,)), rows.box((0,)).length
            self.assertEqual(pads_step_by_step([step], asked, held, shape), padded, msg=f"{length}, {shape}")
            self.assertEqual(same_step_by_step([step], asked, "cpu"), length == 6)


instantiate_parametrized_tests(TestSpelling)

if __name__ == "__main__":
    run_tests()
