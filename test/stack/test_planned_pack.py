# Owner(s): ["oncall: distributed"]
"""Boxes are packed and unpacked without loss, in as few copies as there may be."""

import itertools

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed.tensor._pack import assembled, joined, part
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

    def test_nothing_comes_from_what_arrived(self) -> None:
        """A compiler keeps a collective only if something depends on it."""
        arrived = torch.zeros(0, requires_grad=True)
        self.assertTrue(assembled(arrived, [], (0, 3)).requires_grad)


if __name__ == "__main__":
    run_tests()
