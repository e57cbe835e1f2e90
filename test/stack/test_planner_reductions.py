# Owner(s): ["oncall: distributed"]
"""A reduction that moves, too, takes two collectives at most, and leads from one end to the other."""

import itertools

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.cost import Cost, collectives
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.reductions import Reduction
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllReduce, ReduceScatter

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


class TestReductions(TestCase):
    """All 999 pairs on a (2, 2, 2) mesh."""

    @parametrize("shape", [(16, 16), (5, 3)])
    def test_two_collectives_lead_there(self, shape) -> None:
        for source, target in pairs():
            steps, before, after = best(source, target, shape)
            self.assertLessEqual(collectives(steps), 2, msg=f"{source} to {target}")
            for one, other in itertools.pairwise(steps):
                self.assertEqual(one.after, other.before)
            self.assertEqual((steps[0].before, steps[-1].after), (before, after))

    def test_sums_are_scattered_where_they_are_wanted_in_parts(self) -> None:
        (step,), *_ = best(("sum", "sum", None), (0, 0, None), (16, 16))
        self.assertIsInstance(step, ReduceScatter)
        (step,), *_ = best(("sum", None, "sum"), (None, None, None), (16, 16))
        self.assertIsInstance(step, AllReduce)


instantiate_parametrized_tests(TestReductions)

if __name__ == "__main__":
    run_tests()
