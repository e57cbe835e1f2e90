# Owner(s): ["oncall: distributed"]
"""The cuts that a reduction may leave are along all of its mesh dims, the target's first."""

import itertools

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from planner_simulator import MOVED, SIZES, pairs, regions
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.scatters import Scatters


def scatters(source, target, shape) -> Scatters:
    before, after = regions(source, shape), regions(target, shape)
    return Scatters(before, after, before.pending, Groups.of(None, SIZES))


class TestScatters(TestCase):
    @parametrize("shape", [(16, 16), (5, 3)])
    def test_every_cut_is_along_all_dims_of_the_reduction(self, shape) -> None:
        for source, target in pairs((*MOVED, "sum")):
            asked = scatters(source, target, shape)
            for narrow in asked.narrowed() if asked.axes else ():
                found = [*asked.cuts(narrow)]
                self.assertEqual(len({*found}), len(found))
                for cut in found:
                    self.assertLessEqual(asked.axes, cut.sharded)
                    self.assertEqual(cut.pending & asked.axes, set())

    def test_the_target_comes_first_where_it_is_such_a_cut(self) -> None:
        for target in itertools.product((0, 1), repeat=3):
            asked = scatters(("sum",) * 3, target, (16, 16))
            self.assertEqual(next(asked.cuts(asked.before)), asked.after)

    def test_where_the_cuts_of_the_target_pad_another_one_comes_too(self) -> None:
        """Of five rows in four parts and three columns in two, boxes have four elements; of rows in eight, three."""
        asked = scatters(("sum",) * 3, (0, 0, 1), (5, 3))
        self.assertEqual([cut.most for cut in asked.cuts(asked.before)], [4, 3])

    def test_a_dim_that_divides_evenly_is_taken(self) -> None:
        asked = scatters(("sum", "sum", None), (None, None, None), (5, 8))
        (cut,) = asked.cuts(asked.before)
        self.assertEqual(cut.orders, ((), (0, 1)))


instantiate_parametrized_tests(TestScatters)
if __name__ == "__main__":
    run_tests()
