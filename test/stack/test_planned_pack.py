# Owner(s): ["oncall: distributed"]
"""Boxes are packed and unpacked without loss, by one copy or by several."""

import itertools
from unittest import mock

import torch
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor import _pack
from torch_overlay.distributed.tensor._pack import assembled, joined, part, unpacking, unpacking_in_place
from torch_overlay.distributed.tensor._planner.grids import Grid
from torch_overlay.distributed.tensor._planner.regions import Regions


class TestPack(TestCase):
    @parametrize("large", [_pack.LARGE, 0])
    def test_boxes_come_back_from_one_buffer(self, large) -> None:
        whole = torch.arange(35).reshape(5, 7)
        for dims in itertools.product((None, 0, 1), repeat=2):
            regions = Regions.of(dims, (None, None), (5, 7), (2, 3))
            boxes = {regions.box(place) for place in itertools.product(range(2), range(3))}
            boxes = sorted(box for box in boxes if box.elements)
            with mock.patch.object(_pack, "LARGE", large):
                flat = joined([part(whole, box) for box in boxes])
            starts = itertools.accumulate([box.elements for box in boxes], initial=0)
            self.assertEqual(assembled(flat, [*zip(starts, boxes)], (5, 7)), whole, msg=f"{dims}")

    @parametrize("large", [_pack.LARGE, 0])
    def test_large_parts_are_sorted_where_they_are(self, large) -> None:
        grid = Grid((2, 3, 4, 5), (2, 3, 4, 5), (0, 2, 1, 3))
        flat = torch.arange(120)
        expected = unpacking(grid, (8, 15))(flat)
        with mock.patch.object(_pack, "LARGE", large):
            came = unpacking_in_place(grid, (8, 15))(flat)
        self.assertEqual(came, expected)
        self.assertEqual(came.data_ptr() == flat.data_ptr(), large == 0)


instantiate_parametrized_tests(TestPack)

if __name__ == "__main__":
    run_tests()
