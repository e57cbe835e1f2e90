# Owner(s): ["oncall: distributed"]
"""For which sizes all cuts of a plan are even."""

import contextlib

from torch.testing._internal.common_utils import TestCase, run_tests

from planner_simulator import MOVED, pairs, regions
from torch_overlay.distributed.tensor._planner.cost import Cost
from torch_overlay.distributed.tensor._planner.forms import plan_and_parts, rounded_parts, step_on_shape
from torch_overlay.distributed.tensor._planner.regions import NotPlanned
from torch_overlay.distributed.tensor._planner.steps import Divide, ReduceScatter


def ends(source, target, shape):
    """On a (2, 4) mesh."""
    return regions(source, shape, (2, 4)), regions(target, shape, (2, 4))


class TestEvenParts(TestCase):
    def test_the_plan_cuts_multiples_of_its_parts_evenly(self) -> None:
        for source, target in pairs((*MOVED, "sum"), (*MOVED, "sum"), 2):
            with contextlib.suppress(NotPlanned):
                steps, parts = plan_and_parts(*ends(source, target, (24, 40)), 4, None, Cost())
                changes = [step for step in steps if not isinstance(step, Divide)]
                for factor in (1, 3):
                    shape = tuple(factor * part for part in parts)
                    before, after = ends(source, target, shape)
                    on_shape = [step_on_shape(step, shape) for step in changes]
                    states = [before, after, *[end for step in on_shape for end in (step.before, step.after)]]
                    self.assertTrue(all(state.is_even for state in states), msg=f"{source} to {target} of {shape}")

    def test_parts_of_moves_divide_the_rounded_ones(self) -> None:
        for source, target in pairs((*MOVED, "sum"), MOVED, 2):
            with contextlib.suppress(NotPlanned):
                _, parts = plan_and_parts(*ends(source, target, (24, 40)), 4, None, Cost())
                rounded = rounded_parts(*ends(source, target, (24, 40)))
                for part, whole in zip(parts, rounded, strict=True):
                    whole, part = (part, whole) if "sum" in source else (whole, part)
                    self.assertEqual(whole % part, 0, msg=f"{source} to {target}: {part}, {whole}")

    def test_all_axes_that_take_part_count(self) -> None:
        """The plan cuts the rows into 4 and the columns into 2. Plans for other sizes may cut each of them into 8, by
        both mesh dims."""
        steps, parts = plan_and_parts(*ends(("sum", 0), (1, 0), (24, 40)), 4, None, Cost())
        self.assertEqual(([*map(type, steps)], parts), ([ReduceScatter], (8, 8)))

    def test_a_dim_that_the_plan_for_another_size_cuts_counts(self) -> None:
        """Also where terms are made of a value on a mesh dim more. Of 6 columns the plan cuts none, of 16 it does."""
        for more in ((), (None,)):
            source, target, sizes = (0, "sum", "sum", *more), (None, None, 0, *more), (2, 2, 4, 2)[: 3 + len(more)]
            target = (*target[:3], "sum") if more else target
            asked = [(regions(source, (80, n, 32), sizes), regions(target, (80, n, 32), sizes)) for n in (6, 16)]
            found = [plan_and_parts(*ends, 4, frozenset({(0, 1, 2)}), Cost()) for ends in asked]
            cut = [any(step.after.orders[1] for step in steps if not isinstance(step, Divide)) for steps, _ in found]
            self.assertEqual((cut, found[0][1][1]), ([False, True], 16))


if __name__ == "__main__":
    run_tests()
