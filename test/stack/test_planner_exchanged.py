# Owner(s): ["oncall: distributed"]
"""Reductions by all-to-alls lead from one end to the other, too."""

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from planner_simulator import MOVED, SIZES, is_right, pairs, regions
from torch_overlay.distributed.tensor._planner.cost import Cost
from torch_overlay.distributed.tensor._planner.exchanged import exchanged, in_one
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.reductions import Reduction
from torch_overlay.distributed.tensor._planner.steps import AllToAll


def reduction(source, target, shape, groups=None) -> Reduction:
    """From pending reductions of one kind to none."""
    before, after = regions(source, shape), regions(target, shape)
    op = next(op for op in before.partial if op)
    return Reduction(before, after, before.pending, op, Groups.of(groups, SIZES), 4, Cost())


def reductions(op="sum"):
    """All 999 pairs on a (2, 2, 2) mesh in which something is reduced."""
    return [(source, target) for source, target in pairs((*MOVED, op)) if op in source]


class TestExchanged(TestCase):
    @parametrize("op", ["sum", "avg", "max"])
    @parametrize("groups", [None, ((0, 1, 2),)])
    def test_both_ways_reduce_every_term_once(self, op, groups) -> None:
        """Whether it is the best or not."""
        for source, target in reductions(op):
            asked = reduction(source, target, (5, 3), groups)
            for way in (exchanged, in_one):
                for steps, now in way(asked):
                    self.assertTrue(is_right(steps, asked.before, now), msg=f"{source} to {target}: {steps}")

    def test_it_is_leaner_where_each_rank_wants_little(self) -> None:
        steps = reduction(("sum", 0, None), (0, 1, 1), (16, 16)).best()
        self.assertTrue(any(isinstance(step, AllToAll) and step.op for step in steps), msg=f"{steps}")


instantiate_parametrized_tests(TestExchanged)

if __name__ == "__main__":
    run_tests()
