# Owner(s): ["oncall: distributed"]
"""Reductions of tensors that are cut evenly share a plan, too."""

import contextlib
import itertools
from unittest import mock

from torch.testing._internal.common_utils import TestCase, run_tests

from planner_simulator import MOVED, is_right, pairs, regions
from torch_overlay.distributed.tensor._planner import forms
from torch_overlay.distributed.tensor._planner.cost import collectives
from torch_overlay.distributed.tensor._planner.forms import shared_plan
from torch_overlay.distributed.tensor._planner.plan import plan
from torch_overlay.distributed.tensor._planner.regions import NotPlanned, Regions


def ends(source, target, shape):
    """On a (2, 4) mesh."""
    return regions(source, shape, (2, 4)), regions(target, shape, (2, 4))


class TestSharedReductions(TestCase):
    def test_a_shared_reduction_leads_where_the_own_one_does(self) -> None:
        ends_of = pairs((*MOVED, "sum", "avg"), (*MOVED, "sum"), 2)
        changes = [pair for pair in ends_of if {"sum", "avg"}.intersection((*pair[0], *pair[1]))]
        for shape, (source, target) in itertools.product(((8, 16), (40, 8), (5, 3)), changes):
            before, after = ends(source, target, shape)
            with contextlib.suppress(NotPlanned):
                shared, own = shared_plan(before, after, 4), plan(before, after, 4)
                self.assertEqual(collectives(shared), collectives(own), msg=f"{source} to {target} of {shape}")
                self.assertTrue(is_right(shared, before, after), msg=f"{source} to {target} of {shape}")

    def test_sizes_of_one_form_are_reduced_by_one_plan(self) -> None:
        forms._forms.cache_clear()
        with mock.patch.object(forms, "plan_at_once", wraps=forms.plan_at_once) as planned:
            for length in (1024, 1032, 1040):
                shared_plan(*ends(("sum", 0), (0, 1), (length, 64)), 4)
        self.assertEqual(planned.call_count, 1)

    def test_a_plan_that_tried_to_cut_another_dim_is_not_shared(self) -> None:
        """Of two tensors with the same bytes in the smallest one, each plan cuts the dim that is cut evenly."""
        pending, sizes = (None, "sum", "sum"), (2, 2, 4)
        forms._forms.cache_clear()
        with mock.patch.object(forms, "plan", wraps=plan) as own:
            for columns, rows, cut in ((6, 32, 2), (16, 12, 1)):
                shape = (80, columns, rows)
                before = Regions.of((0, None, None), pending, shape, sizes)
                after = Regions.of((None, None, 0), (None,) * 3, shape, sizes)
                steps = shared_plan(before, after, 4, frozenset({(0, 1, 2)}))
                self.assertEqual(steps[0].after.orders[cut], (0, 1, 2))
        self.assertEqual(own.call_count, 2)

    def test_plans_to_new_pending_sums_are_not_shared(self) -> None:
        forms._forms.cache_clear()
        with mock.patch.object(forms, "plan", wraps=plan) as own:
            for length in (1024, 1032):
                shared_plan(*ends((0, None), ("sum", 0), (length, 64)), 4)
        self.assertEqual(own.call_count, 2)


if __name__ == "__main__":
    run_tests()
