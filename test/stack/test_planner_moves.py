# Owner(s): ["oncall: distributed"]
"""A move is one collective, or none, and leads from one end to the other."""

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from planner_simulator import SIZES, is_right, pairs, regions
from torch_overlay.distributed.tensor._planner.cost import Cost, collectives
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.moves import crossed, move
from torch_overlay.distributed.tensor._planner.steps import Collective


def moved(source, target, shape=(16, 16), groups=None, cost=Cost()):
    """The steps, and the regions from which and to which they should lead."""
    before, after = (regions(spec, shape) for spec in (source, target))
    return move(before, after, Groups.of(groups, SIZES), 4, cost), before, after


class TestMoves(TestCase):
    """All 729 pairs on a (2, 2, 2) mesh."""

    @parametrize("shape", [(16, 16), (5, 3)])
    @parametrize("groups", [None, (), ((0, 1, 2),), ((0, 1), (1, 2))])
    def test_every_rank_gets_its_box(self, shape, groups) -> None:
        joint = {frozenset(group) for group in groups or ()}
        for ends in pairs():
            steps, before, after = moved(*ends, shape, groups)
            self.assertTrue(is_right(steps, before, after), msg=f"{ends}: {steps}")
            self.assertLessEqual(collectives(steps), 3 if groups is not None else 1)
            for step in steps:
                if isinstance(step, Collective) and groups is not None:
                    self.assertTrue(len(step.axes) == 1 or {*step.axes} in joint, msg=f"{ends}: {step}")

    def test_replicas_at_both_ends_take_no_part(self) -> None:
        for ends in pairs():
            steps, before, after = moved(*ends)
            talking = {axis for step in steps if isinstance(step, Collective) for axis in step.axes}
            self.assertLessEqual(crossed(before, after), talking)
            self.assertLessEqual(talking, before.sharded | after.sharded)

    def test_a_slow_mesh_dim_is_crossed_first(self) -> None:
        """With half of what the group over both would bring over it; but not for few bytes, with much latency."""
        slow, fast = (1e5, 1e-6), (1e8, 1e-6)
        for axes, order in (((slow, fast, fast), [(0,), (1,)]), ((fast, slow, fast), [(1,), (0,)])):
            steps, *_ = moved((0, 1, None), (None, None, None), cost=Cost(axes=axes))
            self.assertEqual([step.axes for step in steps], order)
        far = ((1e5, 1.0), (1e8, 1.0), (1e8, 1.0))
        for axes in ((slow,) * 3, far):
            steps, *_ = moved((0, 1, None), (None, None, None), cost=Cost(axes=axes))
            self.assertEqual([step.axes for step in steps], [(0, 1)])

    def test_which_groups_there_are(self) -> None:
        sizes = (2, 3, 4)
        some, every = Groups.of(((0, 2), (1, 2), (0, 1, 2)), sizes), Groups.of(None, sizes)
        self.assertEqual(some.within((0, 1)), [(1,), (0,)])
        self.assertEqual(some.within((0, 1, 2))[:3], [(0, 1, 2), (1, 2), (0, 2)])
        self.assertEqual(every.within((0, 1)), [(0, 1), (1,), (0,)])
        self.assertEqual(some.between((2,), (0, 1, 2)), [(2,), (0, 2), (1, 2), (0, 1, 2)])
        self.assertEqual(every.between((2,), (0, 1, 2)), [(2,), (0, 1, 2)])


instantiate_parametrized_tests(TestMoves)

if __name__ == "__main__":
    run_tests()
