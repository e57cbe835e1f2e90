# Owner(s): ["oncall: distributed"]
"""Placements are read as the boxes that they say."""

import itertools

from torch.distributed.tensor import Partial, Replicate, Shard, _dtensor_spec
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed.tensor._planner.regions import NotPlanned, Regions
from torch_overlay.distributed.tensor._specs import read_cuts


class TestSpecs(TestCase):
    """What DTensor says, as the planner reads it; no process group."""

    def test_placements_are_the_boxes_that_they_say(self) -> None:
        read = {Replicate(): (None, None), Shard(0): (0, None), Shard(1): (1, None), Partial("max"): (None, "max")}
        for placements in itertools.product(read, repeat=2):
            dims, ops = zip(*(read[placement] for placement in placements))
            cuts = read_cuts(placements, None, 2, (2, 3)).on((5, 7), (2, 3))
            self.assertEqual(cuts, Regions.of(dims, ops, (5, 7), (2, 3)), msg=f"{placements}")

    def test_strided_shards_are_an_order_of_mesh_dims(self) -> None:
        """Two ranks cut four parts each, and the outer mesh dim takes them strided."""
        strided = read_cuts((_StridedShard(0, split_factor=2), Shard(0)), None, 1, (2, 2))
        ordered = [_dtensor_spec.ShardOrderEntry(0, (1, 0))]
        self.assertEqual(strided, read_cuts((Shard(0), Shard(0)), ordered, 1, (2, 2)))
        self.assertEqual([strided.on((8,), (2, 2)).box(place).start for place in ((0, 1), (1, 0))], [(4,), (2,)])
        with self.assertRaises(NotPlanned):
            strided.on((7,), (2, 2))

    def test_an_order_of_mesh_dims_is_read(self) -> None:
        for order, starts in (((0, 1), [2, 4]), ((1, 0), [4, 2])):
            cuts = read_cuts((Shard(0), Shard(0)), [_dtensor_spec.ShardOrderEntry(0, order)], 1, (2, 2)).on(
                (8,), (2, 2)
            )
            self.assertEqual([cuts.box(place).start[0] for place in ((0, 1), (1, 0))], starts)

    def test_strided_shards_have_no_order_beside_their_factors(self) -> None:
        ordered = [_dtensor_spec.ShardOrderEntry(0, (1, 0))]
        with self.assertRaisesRegex(NotPlanned, "a shard order of their own"):
            read_cuts((_StridedShard(0, split_factor=2), Shard(0)), ordered, 1, (2, 2))

    def test_a_subclass_may_mean_anything(self) -> None:
        class Other(Partial):
            pass

        with self.assertRaisesRegex(NotPlanned, "a placement of the class Other"):
            read_cuts((Other("sum"),), None, 1, (2,))


if __name__ == "__main__":
    run_tests()
