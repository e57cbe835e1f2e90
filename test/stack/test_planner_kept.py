# Owner(s): ["oncall: distributed"]
"""What every rank has already of what it should have: against a look at each rank."""

import itertools

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from step_simulator import pairs, regions
from torch_overlay.distributed.tensor._planner.boxes import shortest
from torch_overlay.distributed.tensor._planner.regions import least_overlap


@instantiate_parametrized_tests
class TestKept(TestCase):
    @parametrize("shape", [(12, 12), (7, 5), (1, 6), (6, 0)])
    @parametrize("sizes", [(2, 3), (2, 2)])
    def test_no_rank_has_less(self, shape, sizes) -> None:
        for old, new in pairs(mesh_dims=2):
            before, after = regions(old, shape, sizes), regions(new, shape, sizes)
            places = itertools.product(*map(range, sizes))
            true = min(before.box(place).meet(after.box(place)).elements for place in places)
            self.assertLessEqual(least_overlap(before, after), true, msg=f"{old} to {new}")
            if shape == (12, 12):  # all cuts are even
                self.assertEqual(least_overlap(before, after), true, msg=f"{old} to {new}")

    @parametrize("parts", [(3,), (2, 2), (3, 2), (2, 3, 2)])
    def test_the_shortest_piece(self, parts) -> None:
        for length in range(30):
            pieces = (
                regions((0,) * len(parts), (length,), parts).span(0, at)[1]
                for at in itertools.product(*map(range, parts))
            )
            self.assertEqual(shortest(length, parts), min(pieces), msg=f"{length}")


if __name__ == "__main__":
    run_tests()
