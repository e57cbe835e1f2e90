# Owner(s): ["oncall: distributed"]
"""Reductions over the one group that contains all lead from one end to the other, too."""

from dataclasses import replace

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from planner_simulator import MOVED, SIZES, is_right, pairs, regions
from torch_overlay.distributed.tensor._planner.cost import Cost, arriving
from torch_overlay.distributed.tensor._planner.exchanged import exchanged
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.reductions import Reduction
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllToAll, Collective


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


class TestOneGroup(TestCase):
    @parametrize("shape", [(16, 16), (5, 3)])
    def test_one_group_reduces_every_term_once(self, shape) -> None:
        for source, target in reductions():
            asked = grouped(source, target, shape, ((0, 1, 2),))
            steps = asked.best()
            self.assertTrue(is_right(steps, asked.before, asked.after), msg=f"{source} to {target}: {steps}")
            for step in steps:
                if isinstance(step, Collective):
                    self.assertIn(len(step.axes), (1, 3), msg=f"{source} to {target}: {step}")

    @parametrize("op", ["sum", "avg", "max"])
    def test_exchanged_terms_are_reduced_once(self, op) -> None:
        """Whether that is the best or not."""
        for source, target in reductions(op):
            asked = grouped(source, target, (5, 3), ((0, 1, 2),))
            for steps, now in exchanged(asked):
                self.assertTrue(is_right(steps, asked.before, now), msg=f"{source} to {target}: {steps}")

    def test_terms_are_exchanged_where_only_the_whole_has_a_group(self) -> None:
        """As terms of a part for each rank, which then moves; all terms of what a rank wants would be 16384 bytes."""
        steps = grouped(("sum", "sum", 0), (0, None, 1), (64, 64), ((0, 1, 2),)).best()
        brought = [(type(step), 4 * arriving(step)) for step in steps]
        self.assertEqual(brought, [(AllToAll, 8192), (AllGather, 2048)])

    def test_a_part_is_cut_where_a_group_leads_on(self) -> None:
        """From R·S1·S0 to S1·S0·S1 mesh dims 1 and 2 would talk, without a group; from R·S1·S1 dim 1 does alone."""
        asked = grouped((None, 1, "sum"), (1, 0, 1), (16, 16), ())
        cuts = [cut.orders for cut in asked.scatters.cuts(asked.before)]
        self.assertEqual(cuts, [((2,), (1,)), ((), (1, 2))])


instantiate_parametrized_tests(TestOneGroup)

if __name__ == "__main__":
    run_tests()
