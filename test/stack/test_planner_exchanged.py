# Owner(s): ["oncall: distributed"]
"""Reductions by one all-to-all lead from one end to the other, too."""

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from planner_simulator import MOVED, SIZES, is_right, pairs, regions
from torch_overlay.distributed.tensor._planner.cost import Cost, arriving
from torch_overlay.distributed.tensor._planner.exchanged import in_one
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.reductions import Reduction
from torch_overlay.distributed.tensor._planner.steps import AllToAll


def reduction(source, target, shape) -> Reduction:
    """From pending reductions of one kind to none, with all groups at hand."""
    before, after = regions(source, shape), regions(target, shape)
    op = next(op for op in before.partial if op)
    return Reduction(before, after, before.pending, op, Groups.of(None, SIZES), 4, Cost())


def reductions(op="sum"):
    """All 999 pairs on a (2, 2, 2) mesh in which something is reduced."""
    return [(source, target) for source, target in pairs((*MOVED, op)) if op in source]


class TestExchanged(TestCase):
    @parametrize("op", ["sum", "avg", "max"])
    def test_every_term_is_reduced_once(self, op) -> None:
        """Whether it is the best or not."""
        for source, target in reductions(op):
            asked = reduction(source, target, (5, 3))
            for steps, now in in_one(asked):
                self.assertTrue(is_right(steps, asked.before, now), msg=f"{source} to {target}: {steps}")

    def test_it_is_leaner_where_each_rank_wants_little(self) -> None:
        """384 bytes, where a reduce-scatter and an all-to-all bring 448."""
        (step,) = reduction((None, 0, "sum"), (None, 1, 1), (16, 16)).best()
        self.assertEqual((type(step), step.op, 4 * arriving(step)), (AllToAll, "sum", 384))


instantiate_parametrized_tests(TestExchanged)

if __name__ == "__main__":
    run_tests()
