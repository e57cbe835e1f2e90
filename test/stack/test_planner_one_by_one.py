# Owner(s): ["oncall: distributed"]
"""Reductions over one group after the other lead from one end to the other, too."""

from dataclasses import replace

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from planner_simulator import MOVED, SIZES, is_right, pairs, regions
from torch_overlay.distributed.tensor._planner.cost import Cost, arriving
from torch_overlay.distributed.tensor._planner.exchanged import one_group_at_a_time
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.reductions import Reduction
from torch_overlay.distributed.tensor._planner.steps import AllReduce, AllToAll, Collective, ReduceScatter


def reduction(source, target, shape) -> Reduction:
    """From pending reductions of one kind to none, with all groups at hand."""
    before, after = regions(source, shape), regions(target, shape)
    op = next(op for op in before.partial if op)
    return Reduction(before, after, before.pending, op, Groups.of(None, SIZES), 4, Cost())


def grouped(source, target, shape, groups) -> Reduction:
    """With these joint groups at hand alone."""
    return replace(reduction(source, target, shape), groups=Groups.of(groups, SIZES))


def reductions(op="sum"):
    """All 999 pairs on a (2, 2, 2) mesh in which something is reduced."""
    return [(source, target) for source, target in pairs((*MOVED, op)) if op in source]


class TestOneByOne(TestCase):
    @parametrize("groups", [(), ((0, 1), (1, 2))])
    @parametrize("shape", [(16, 16), (5, 3)])
    def test_groups_that_there_are_reduce_every_term_once(self, groups, shape) -> None:
        joint = {frozenset(group) for group in groups}
        for source, target in reductions():
            asked = grouped(source, target, shape, groups)
            steps = asked.best()
            self.assertTrue(is_right(steps, asked.before, asked.after), msg=f"{source} to {target}: {steps}")
            for step in steps:
                if isinstance(step, Collective):
                    self.assertTrue(len(step.axes) == 1 or {*step.axes} in joint, msg=f"{source} to {target}: {step}")

    @parametrize("op", ["sum", "avg", "max"])
    def test_one_group_at_a_time_reduces_every_term_once(self, op) -> None:
        """Whether it is the best or not."""
        for source, target in reductions(op):
            asked = grouped(source, target, (5, 3), ())
            for steps, now in one_group_at_a_time(asked):
                self.assertTrue(is_right(steps, asked.before, now), msg=f"{source} to {target}: {steps}")

    def test_a_move_may_come_before_the_reductions(self) -> None:
        """One all-reduce at once would bring 8192 bytes."""
        steps = grouped(("sum", "sum", 0), (0, None, 1), (64, 64), ()).best()
        brought = [(type(step), 4 * arriving(step)) for step in steps]
        self.assertEqual(brought, [(AllToAll, 4096), (ReduceScatter, 4096), (AllReduce, 4096)])


instantiate_parametrized_tests(TestOneByOne)

if __name__ == "__main__":
    run_tests()
