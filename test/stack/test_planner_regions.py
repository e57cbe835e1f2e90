# Owner(s): ["oncall: distributed"]
"""What each coordinate of a mesh holds of a tensor, as boxes, against chunking by hand."""

import itertools

import torch
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.regions import Regions


def cut(length: int, sizes, coordinate) -> list[int]:
    """The places along a dim that a coordinate holds, by torch.chunk along one mesh dim after the other."""
    held = torch.arange(length)
    for size, at in zip(sizes, coordinate, strict=True):
        chunks = held.chunk(size)
        held = chunks[at] if at < len(chunks) else held[:0]
    return held.tolist()


class TestRegions(TestCase):
    """Two mesh dims cut one tensor dim, evenly, unevenly, and so that some ranks hold nothing."""

    @parametrize("sizes", [(2, 2), (2, 3), (3, 2)])
    @parametrize("length", range(10))
    def test_nested_chunks(self, sizes, length) -> None:
        regions = Regions.of((0, 0), (None, None), (length,), sizes)
        seen = []
        for coordinate in itertools.product(*map(range, sizes)):
            box = regions.box(coordinate)
            start, count = regions.span(0, coordinate)
            held = [*range(start, start + count)]
            self.assertEqual(tuple(box), ((start,), (count,)))
            self.assertEqual(held, cut(length, sizes, coordinate), msg=f"{coordinate}")
            seen += held
        self.assertEqual(sorted(seen), [*range(length)])

    def test_a_replica_holds_what_its_copies_hold(self) -> None:
        regions = Regions.of((None, 1), (None, None), (6, 4), (2, 2))
        self.assertEqual(regions.box((0, 1)), regions.box((1, 1)))
        self.assertNotEqual(regions.box((0, 0)), regions.box((0, 1)))


instantiate_parametrized_tests(TestRegions)

if __name__ == "__main__":
    run_tests()
