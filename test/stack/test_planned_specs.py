# Owner(s): ["oncall: distributed"]
"""Placements are read as the boxes that they say."""

import itertools

from torch.distributed.tensor import Partial, Replicate, Shard
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

    def test_a_subclass_may_mean_anything(self) -> None:
        class Other(Partial):
            pass

        with self.assertRaisesRegex(NotPlanned, "a placement of the class Other"):
            read_cuts((Other("sum"),), None, 1, (2,))


if __name__ == "__main__":
    run_tests()
