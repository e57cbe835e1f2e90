# Owner(s): ["oncall: distributed"]
"""Tensors that are cut evenly and have about as many bytes share a plan, which is one of theirs."""

import itertools
from unittest import mock

from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed.tensor._planner import forms
from torch_overlay.distributed.tensor._planner.cost import collectives
from torch_overlay.distributed.tensor._planner.forms import shared_plan
from torch_overlay.distributed.tensor._planner.plan import plan
from torch_overlay.distributed.tensor._planner.regions import Regions

SIZES = (2, 4)


def ends(source, target, shape):
    """Of two mesh dims: None, the dim that it shards, or "sum"."""
    dims = [one if one != "sum" else None for one in source]
    before = Regions.of(dims, [one if one == "sum" else None for one in source], shape, SIZES)
    return before, Regions.of(target, (None, None), shape, SIZES)


class TestForms(TestCase):
    def test_a_shared_plan_leads_where_the_own_one_does(self) -> None:
        for shape in ((8, 16), (40, 8), (5, 3)):
            for source in itertools.product((None, 0, 1, "sum"), repeat=2):
                for target in itertools.product((None, 0, 1), repeat=2):
                    before, after = ends(source, target, shape)
                    shared, own = shared_plan(before, after, 4), plan(before, after, 4)
                    self.assertEqual(collectives(shared), collectives(own), msg=f"{source} to {target} of {shape}")
                    if shared:
                        self.assertEqual((shared[0].before, shared[-1].after), (before, after))

    def test_sizes_of_one_form_are_planned_once(self) -> None:
        forms._forms.cache_clear()
        with mock.patch.object(forms, "plan_and_parts", wraps=forms.plan_and_parts) as planned:
            for length in (1024, 1032, 1040):
                shared_plan(*ends((0, 0), (1, None), (length, 64)), 4)
        self.assertEqual(planned.call_count, 1)


if __name__ == "__main__":
    run_tests()
