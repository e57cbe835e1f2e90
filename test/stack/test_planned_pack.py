# Owner(s): ["oncall: distributed"]
"""Boxes are packed and unpacked without loss, in as few copies as there may be."""

import itertools

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed.tensor._pack import assembled, joined, packing, part, unpacking
from torch_overlay.distributed.tensor._planner.grids import Grid
from torch_overlay.distributed.tensor._planner.regions import Regions


class TestPack(TestCase):
    def test_boxes_come_back_from_one_buffer(self) -> None:
        whole = torch.arange(35).reshape(5, 7)
        for dims in itertools.product((None, 0, 1), repeat=2):
            regions = Regions.of(dims, (None, None), (5, 7), (2, 3))
            boxes = {regions.box(place) for place in itertools.product(range(2), range(3))}
            boxes = sorted(box for box in boxes if box.elements)
            flat = joined([part(whole, box) for box in boxes])
            starts = itertools.accumulate([box.elements for box in boxes], initial=0)
            self.assertEqual(assembled(flat, [*zip(starts, boxes)], (5, 7)), whole, msg=f"{dims}")

    def test_equal_pieces_are_one_permute(self) -> None:
        local = torch.arange(24).reshape(6, 4)
        packed = packing(Grid((2, 3, 4), (2, 3, 4), (1, 0, 2)))(local)
        self.assertEqual(packed, local.reshape(2, 3, 4).transpose(0, 1).flatten())
        self.assertEqual(unpacking(Grid((3, 2, 4), (3, 2, 4), (1, 0, 2)), (6, 4))(packed), local)


if __name__ == "__main__":
    run_tests()
