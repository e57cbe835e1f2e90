# Owner(s): ["oncall: distributed"]
"""A dim that mesh dims cut in another order than that of the mesh is boxes, if it is cut evenly."""

import itertools

from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.regions import NotPlanned, Regions


class TestOrders(TestCase):
    @parametrize("sizes", [(2, 2), (2, 3), (3, 2)])
    def test_an_even_strided_shard_is_a_box(self, sizes) -> None:
        """The second mesh dim cuts first, as its split factor says."""
        regions = Regions.of((0, 0), (None, None), (12,), sizes, factors=(sizes[1], 1))
        for place in itertools.product(*map(range, sizes)):
            placements = (_StridedShard(0, split_factor=sizes[1]), Shard(0))
            length, start = _compute_local_shape_and_global_offset((12,), sizes, [*place], placements)
            self.assertEqual(tuple(regions.box(place)), (start, length), msg=f"{place}")

    def test_an_explicit_order_cuts_by_that_order(self) -> None:
        regions = Regions.of((0, 0), (None, None), (12,), (2, 3), shard_order=((0, (1, 0)),))
        starts = [regions.box(place).start[0] for place in itertools.product(range(2), range(3))]
        self.assertEqual(starts, [0, 4, 8, 2, 6, 10])

    @parametrize("said", [{"factors": (2, 1)}, {"shard_order": ((0, (1, 0)),)}])
    def test_an_uneven_cut_in_another_order_is_refused(self, said) -> None:
        with self.assertRaisesRegex(NotPlanned, r"dim 0 of length 5 is cut by axes \(1, 0\) in that order, unevenly"):
            Regions.of((0, 0), (None, None), (5,), (2, 2), **said)


instantiate_parametrized_tests(TestOrders)

if __name__ == "__main__":
    run_tests()
