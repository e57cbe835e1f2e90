# Owner(s): ["oncall: distributed"]
"""An all-to-all is over more mesh dims than it needs where that balances the senders."""

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from planner_simulator import SIZES, is_right, pairs, regions
from torch_overlay.distributed.tensor._planner.cost import Cost, leaving
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.moves import all_to_alls, crossed, move
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.senders import Exchange


class TestBalanced(TestCase):
    @parametrize("size", [4, 8])
    def test_replicas_share_the_sending(self, size) -> None:
        shape, sizes = (size**2 << 20,), (size, size)
        before, after = (Regions.of(dims, (None, None), shape, sizes) for dims in ((None, 0), (0, None)))
        (step,) = move(before, after, Groups.of(None, sizes), 4, Cost())
        self.assertEqual(step.axes, (0, 1))
        self.assertEqual(leaving(step), after.most)
        (nearest,) = move(before, after, Groups.of((), sizes), 4, Cost())
        self.assertEqual(nearest.axes, (1,))
        self.assertEqual(leaving(nearest), (size - 1) * after.most)

    def test_small_data_goes_over_the_smaller_group(self) -> None:
        before, after = (Regions.of(dims, (None, None), (16,), (4, 4)) for dims in ((None, 0), (0, None)))
        (step,) = move(before, after, Groups.of(None, (4, 4)), 4, Cost())
        self.assertEqual(step.axes, (1,))

    @parametrize("shape", [(16, 16), (5, 3)])
    def test_every_all_to_all_brings_every_rank_its_box(self, shape) -> None:
        """Of all 729 pairs on a (2, 2, 2) mesh, also those that aren't taken."""
        groups = Groups.of(None, SIZES)
        for source, target in pairs():
            before, after = regions(source, shape), regions(target, shape)
            axes = tuple(sorted(crossed(before, after)))
            for step in all_to_alls(Exchange(before, after, axes), before.free, groups) if axes else ():
                self.assertTrue(is_right((step,), before, after), msg=f"{source} to {target}: {step}")
                self.assertLessEqual({*axes}, {*step.axes})


instantiate_parametrized_tests(TestBalanced)

if __name__ == "__main__":
    run_tests()
