# Owner(s): ["oncall: distributed"]
"""Reductions in two parts, and after a move, lead from one end to the other, too."""

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from planner_simulator import MOVED, SIZES, is_right, pairs, regions
from torch_overlay.distributed.tensor._planner.cost import Cost
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.reductions import Reduction
from torch_overlay.distributed.tensor._planner.steps import AllReduce, AllToAll, ReduceScatter


def reduction(source, target, shape) -> Reduction:
    """From pending reductions of one kind to none, with all groups at hand."""
    before, after = regions(source, shape), regions(target, shape)
    op = next(op for op in before.partial if op)
    return Reduction(before, after, before.pending, op, Groups.of(None, SIZES), 4, Cost())


def reductions(op="sum"):
    """All 999 pairs on a (2, 2, 2) mesh in which something is reduced."""
    return [(source, target) for source, target in pairs((*MOVED, op)) if op in source]


class TestMovedFirst(TestCase):
    @parametrize("op", ["sum", "avg", "max"])
    def test_both_ways_reduce_every_term_once(self, op) -> None:
        """Whether they are the best or not."""
        for source, target in reductions(op):
            asked = reduction(source, target, (5, 3))
            for way in (asked.part_whole, asked.moved_first):
                for steps, now in way():
                    self.assertTrue(is_right(steps, asked.before, now), msg=f"{source} to {target}: {steps}")

    def test_what_cuts_the_target_is_scattered_before_the_rest_is_reduced(self) -> None:
        steps = reduction(("sum", "sum", None), (0, None, None), (1 << 10, 1 << 10)).best()
        self.assertEqual([type(step) for step in steps], [ReduceScatter, AllReduce])
        self.assertEqual([step.axes for step in steps], [(0,), (1,)])

    def test_what_is_smaller_in_the_end_is_moved_first(self) -> None:
        steps = reduction((None, 0, "sum"), (0, 1, None), (1 << 10, 1 << 10)).best()
        self.assertEqual([(type(step), step.axes) for step in steps], [(AllToAll, (1,)), (AllReduce, (2,))])


instantiate_parametrized_tests(TestMovedFirst)

if __name__ == "__main__":
    run_tests()
