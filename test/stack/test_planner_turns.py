# Owner(s): ["oncall: distributed"]
"""Where no group is at hand for a move as a whole, smaller ones lead from one end to the other, too."""

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from planner_simulator import SIZES, is_right, pairs, regions
from torch_overlay.distributed.tensor._planner.cost import Cost, collectives
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.moves import move
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllToAll, Collective


class TestTurns(TestCase):
    """All 729 pairs on a (2, 2, 2) mesh."""

    @parametrize("shape", [(16, 16), (5, 3)])
    @parametrize("groups", [(), ((0, 1, 2),), ((0, 1), (1, 2))])
    def test_every_rank_gets_its_box(self, shape, groups) -> None:
        joint = {frozenset(group) for group in groups}
        for source, target in pairs():
            before, after = regions(source, shape), regions(target, shape)
            steps = move(before, after, Groups.of(groups, SIZES), 4, Cost())
            self.assertTrue(is_right(steps, before, after), msg=f"{source} to {target}: {steps}")
            self.assertLessEqual(collectives(steps), 3)
            for step in steps:
                if isinstance(step, Collective):
                    self.assertTrue(len(step.axes) == 1 or {*step.axes} in joint, msg=f"{source} to {target}: {step}")

    @parametrize(
        "source, target, axes", [((None, 0, 1), (0, None, None), [(1,), (2,)]), ((0, 1, None), (1, 0, 0), [(0, 1, 2)])]
    )
    def test_a_bigger_group_may_be_slower_than_two(self, source, target, axes) -> None:
        """No group is over just the two mesh dims that communicate, but one contains them."""
        before, after = regions(source, (16, 16)), regions(target, (16, 16))
        steps = move(before, after, Groups.of(((0, 1, 2),), SIZES), 4, Cost())
        self.assertEqual([step.axes for step in steps if isinstance(step, Collective)], axes)

    def test_a_group_gives_up_cuts_and_makes_those_that_fit(self) -> None:
        before, after = regions((0, 1, None), (16, 16)), regions((1, 0, None), (16, 16))
        steps = move(before, after, Groups.of((), SIZES), 4, Cost())
        self.assertEqual([(type(step), step.axes) for step in steps], [(AllGather, (0,)), (AllToAll, (1,))])


instantiate_parametrized_tests(TestTurns)

if __name__ == "__main__":
    run_tests()
