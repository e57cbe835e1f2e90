# Owner(s): ["oncall: distributed"]
"""Reductions by all-to-alls and over smaller groups lead from one end to the other, too."""

import itertools

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.cost import Cost, collectives
from torch_overlay.distributed.tensor._planner.exchanged import one_group_at_a_time
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.reductions import Reduction
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllToAll, Collective

SIZES = (2, 2, 2)


def best(source, target, shape, groups=None):
    """The steps from a source with pending sums to a target without, and both as regions."""
    pending = frozenset(axis for axis, one in enumerate(source) if one == "sum")
    dims = [one if one != "sum" else None for one in source]
    before = Regions.of(dims, [one if one == "sum" else None for one in source], shape, SIZES)
    after = Regions.of(target, (None,) * 3, shape, SIZES)
    asked = Reduction(before, after, pending, "sum", Groups.of(groups, SIZES), 4, Cost(), set())
    return asked.best(), before, after


def pairs():
    for source in itertools.product((None, 0, 1, "sum"), repeat=3):
        if "sum" in source:
            yield from ((source, target) for target in itertools.product((None, 0, 1), repeat=3))


class TestExchanged(TestCase):
    """All 999 pairs on a (2, 2, 2) mesh, by what groups there are."""

    @parametrize("groups", [(), ((0, 1, 2),), ((0, 1), (1, 2))])
    @parametrize("shape", [(16, 16), (5, 3)])
    def test_steps_lead_there_over_groups_that_there_are(self, groups, shape) -> None:
        joint = {frozenset(group) for group in groups}
        for source, target in pairs():
            steps, before, after = best(source, target, shape, groups)
            for one, other in itertools.pairwise(steps):
                self.assertEqual(one.after, other.before)
            self.assertEqual((steps[0].before, steps[-1].after), (before, after))
            for step in steps:
                if isinstance(step, Collective):
                    self.assertTrue(len(step.axes) == 1 or {*step.axes} in joint, msg=f"{source} to {target}: {step}")

    def test_one_group_at_a_time_ends_all_reductions(self) -> None:
        for source, target in pairs():
            _, before, after = best(source, target, (16, 16), ())
            asked = Reduction(before, after, before.pending, "sum", Groups.of((), SIZES), 4, Cost(), set())
            for steps, now in one_group_at_a_time(asked):  # none where one group has all that talk
                self.assertEqual((steps[0].before, steps[-1].after), (before, now))
                self.assertFalse(now.pending, msg=f"{source} to {target}")

    def test_terms_are_exchanged_where_only_the_whole_has_a_group(self) -> None:
        steps, *_ = best(("sum", "sum", 0), (0, None, 1), (16, 16), ((0, 1, 2),))
        self.assertTrue(any(isinstance(step, AllToAll) and step.op for step in steps), msg=f"{steps}")
        self.assertLessEqual(collectives(steps), 2)


instantiate_parametrized_tests(TestExchanged)
if __name__ == "__main__":
    run_tests()
