# Owner(s): ["oncall: distributed"]
"""Of the cuts that a move gives up, those go first that are in the way of others."""

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from planner_simulator import is_right, regions
from torch_overlay.distributed.tensor._planner.cost import Cost, arriving
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.moves import move
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllToAll


class TestUnblocked(TestCase):
    @parametrize("source, target", [((0, 1), (1, None)), ((1, 0), (0, None))])
    def test_a_cut_in_the_way_goes_first(self, source, target) -> None:
        before, after = (regions(ends, (8, 8), (2, 2)) for ends in (source, target))
        steps = move(before, after, Groups.of((), (2, 2)), 4, Cost())
        self.assertTrue(is_right(steps, before, after))
        self.assertEqual([(type(step), step.axes) for step in steps], [(AllGather, (1,)), (AllToAll, (0,))])
        self.assertEqual([*map(arriving, steps)], [16, 16])


instantiate_parametrized_tests(TestUnblocked)

if __name__ == "__main__":
    run_tests()
