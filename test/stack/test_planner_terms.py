# Owner(s): ["oncall: distributed"]
"""Plans to pending reductions that the source doesn't have, by value."""

import contextlib

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from planner_simulator import MOVED, is_right, pairs, regions
from torch_overlay.distributed.tensor._planner.plan import plan
from torch_overlay.distributed.tensor._planner.regions import NotPlanned


class TestTerms(TestCase):
    """A shard becomes a term with zeros around it, a value is divided by the number of terms."""

    @parametrize("ops, plans", [(("sum", "avg"), 441), (("max",), 196)])
    @parametrize("groups", [None, ()])
    def test_every_rank_ends_with_its_part_or_its_term(self, ops, plans, groups) -> None:
        """Of all pairs on a (2, 3) mesh that can be planned, pending targets among them."""
        ran = 0
        for source, target in pairs((*MOVED, *ops), (*MOVED, *ops), 2):
            before, after = (regions(spec, (4, 5), (2, 3)) for spec in (source, target))
            with contextlib.suppress(NotPlanned):
                steps = plan(before, after, 4, groups)
                self.assertTrue(is_right(steps, before, after), msg=f"{source} to {target}: {steps}")
                ran += 1
        self.assertEqual(ran, plans, msg="the others can't be made")

    @parametrize(
        "source, target, why",
        [
            ("sum", "avg", "a pending sum can't become a pending avg"),
            (0, "avg", "a shard can't become a term of avg"),
            (None, "product", "a value can't be split into terms of product"),
        ],
    )
    def test_terms_that_cannot_be_made_are_refused(self, source, target, why) -> None:
        with self.assertRaisesRegex(NotPlanned, why):
            plan(*(regions((end, None), (4, 4), (2, 2)) for end in (source, target)), 4)


instantiate_parametrized_tests(TestTerms)

if __name__ == "__main__":
    run_tests()
