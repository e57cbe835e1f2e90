# Owner(s): ["oncall: distributed"]
"""Where speeds are known, a group is as slow as its slowest mesh dim, and a move may cross that one first or last."""

from torch.testing._internal.common_utils import TestCase, run_tests

from planner_simulator import SIZES, regions
from torch_overlay.distributed.tensor._planner.cost import Cost
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.moves import move
from torch_overlay.distributed.tensor._planner.steps import AllGather


def moved(source, target, cost, joint=None):
    """The steps of a move with these joint groups at hand, or all."""
    before, after = (regions(spec, (16, 16)) for spec in (source, target))
    return move(before, after, Groups.of(joint, SIZES), 4, cost)


class TestTopology(TestCase):
    def test_a_joint_group_is_as_slow_as_its_slowest_dim(self) -> None:
        known = Cost.of(("host", "gpu"), [("host", 2.0, 5.0), ("gpu", 100.0, 1.0)])
        both = AllGather(regions((0, 0), (16, 16), (2, 4)), regions((None, None), (16, 16), (2, 4)), (0, 1))
        self.assertEqual(known.seconds(both, 1), 5.0 * (1 + 3) / 2 + 112)
        self.assertEqual(known.by_speed((0, 1))[0], (frozenset({0}), frozenset({1})))

    def test_of_equal_bandwidths_the_longer_latency_is_slower(self) -> None:
        known = Cost(axes=((1.0, 1.0), (1.0, 2.0)))
        self.assertEqual(known.by_speed((0, 1))[0], (frozenset({1}), frozenset({0})))

    def test_a_slow_mesh_dim_is_crossed_last_where_less_is_left_for_it(self) -> None:
        slow, fast = (1e5, 1e-6), (1e8, 1e-6)
        steps = moved((0, None, 1), (None, 1, None), cost=Cost(axes=(slow, fast, fast)))
        self.assertEqual([step.axes for step in steps], [(2,), (0,)])

    def test_a_slow_mesh_dim_is_crossed_first(self) -> None:
        """With half of what the group over both would bring over it; but not for few bytes, with much latency, or where
        all are alike."""
        slow, fast = (1e5, 1e-6), (1e8, 1e-6)
        for axes, order in (((slow, fast, fast), [(0,), (1,)]), ((fast, slow, fast), [(1,), (0,)])):
            for joint in (None, ()):
                steps = moved((0, 1, None), (None, None, None), Cost(axes=axes), joint)
                self.assertEqual([step.axes for step in steps], order, msg=f"{joint}")
        far = ((1e5, 1.0), (1e8, 1.0), (1e8, 1.0))
        for axes in ((slow,) * 3, far):
            steps = moved((0, 1, None), (None, None, None), cost=Cost(axes=axes))
            self.assertEqual([step.axes for step in steps], [(0, 1)])


if __name__ == "__main__":
    run_tests()
