# Owner(s): ["oncall: distributed"]
"""Reductions of tensors that are cut evenly share a plan, too."""

import contextlib
import itertools
from unittest import mock

from torch.testing._internal.common_utils import TestCase, run_tests

from planner_simulator import MOVED, is_right, pairs, regions
from torch_overlay.distributed.tensor._planner import forms
from torch_overlay.distributed.tensor._planner.cost import Cost, collectives
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
        with mock.patch.object(forms, "plan_and_parts", wraps=forms.plan_and_parts) as planned:
            for length in (1024, 1032, 1040):
                shared_plan(*ends(("sum", 0), (0, 1), (length, 64)), 4)
        self.assertEqual(planned.call_count, 1)

    def test_what_was_cut_on_the_way_must_be_even(self) -> None:
        """Other plans than the chosen one would have cut dim 1, evenly for one size and unevenly for another."""
        pending, sizes = (None, "sum", "sum"), (2, 2, 4)
        before = Regions.of((0, None, None), pending, (80, 6, 32), sizes)
        after = Regions.of((None, None, 0), (None,) * 3, (80, 6, 32), sizes)
        _, parts = forms.plan_and_parts(before, after, 4, frozenset({(0, 1, 2)}), Cost())
        self.assertEqual(parts, (16, 16, 16))


if __name__ == "__main__":
    run_tests()
