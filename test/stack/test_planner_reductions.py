# Owner(s): ["oncall: distributed"]
"""A reduction that moves, too, takes two collectives at most, and leads from one end to the other."""

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from planner_simulator import MOVED, SIZES, is_right, pairs, regions
from torch_overlay.distributed.tensor._planner.cost import Cost, collectives
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.reductions import Reduction
from torch_overlay.distributed.tensor._planner.steps import AllReduce, ReduceScatter


def reduction(source, target, shape) -> Reduction:
    """From pending reductions of one kind to none, with all groups at hand."""
    before, after = regions(source, shape), regions(target, shape)
    op = next(op for op in before.partial if op)
    return Reduction(before, after, before.pending, op, Groups.of(None, SIZES), 4, Cost())


def reductions(op="sum"):
    """All 999 pairs on a (2, 2, 2) mesh in which something is reduced."""
    return [(source, target) for source, target in pairs((*MOVED, op)) if op in source]


class TestReductions(TestCase):
    @parametrize("op", ["sum", "avg", "max"])
    @parametrize("shape", [(16, 16), (5, 3)])
    def test_two_collectives_reduce_every_term_once(self, op, shape) -> None:
        for source, target in reductions(op):
            asked = reduction(source, target, shape)
            steps = asked.best()
            self.assertLessEqual(collectives(steps), 2, msg=f"{source} to {target}")
            self.assertTrue(is_right(steps, asked.before, asked.after), msg=f"{source} to {target}: {steps}")

    def test_sums_are_scattered_where_they_are_wanted_in_parts(self) -> None:
        (step,) = reduction(("sum", "sum", None), (0, 0, None), (16, 16)).best()
        self.assertIsInstance(step, ReduceScatter)
        (step,) = reduction(("sum", None, "sum"), (None, None, None), (16, 16)).best()
        self.assertIsInstance(step, AllReduce)


instantiate_parametrized_tests(TestReductions)

if __name__ == "__main__":
    run_tests()
