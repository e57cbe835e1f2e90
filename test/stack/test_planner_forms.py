# Owner(s): ["oncall: distributed"]
"""Tensors that are cut evenly and have about as many bytes share a plan: that of the smallest such tensor."""

import itertools
from unittest import mock

from torch.testing._internal.common_utils import TestCase, run_tests

from planner_simulator import MOVED, is_right, pairs, regions
from torch_overlay.distributed.tensor._planner import forms
from torch_overlay.distributed.tensor._planner.cost import collectives
from torch_overlay.distributed.tensor._planner.forms import shared_plan
from torch_overlay.distributed.tensor._planner.plan import plan


def ends(source, target, shape):
    """On a (2, 4) mesh."""
    return regions(source, shape, (2, 4)), regions(target, shape, (2, 4))


class TestForms(TestCase):
    def test_a_shared_plan_leads_where_the_own_one_does(self) -> None:
        changes = pairs(MOVED, MOVED, 2)
        for shape, (source, target) in itertools.product(((8, 16), (40, 8), (5, 3)), changes):
            before, after = ends(source, target, shape)
            shared, own = shared_plan(before, after, 4), plan(before, after, 4)
            self.assertEqual(collectives(shared), collectives(own), msg=f"{source} to {target} of {shape}")
            self.assertTrue(is_right(shared, before, after), msg=f"{source} to {target} of {shape}")

    def test_sizes_of_one_form_are_planned_once(self) -> None:
        forms._forms.cache_clear()
        with mock.patch.object(forms, "plan_at_once", wraps=forms.plan_at_once) as planned:
            for length in (1024, 1032, 1040):
                shared_plan(*ends((0, 0), (1, None), (length, 64)), 4)
        self.assertEqual(planned.call_count, 1)


if __name__ == "__main__":
    run_tests()
