# Owner(s): ["oncall: distributed"]
"""What a coordinate holds of a tensor, as boxes."""

import itertools

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.boxes import Box
from torch_overlay.distributed.tensor._planner.cost import cut_into_rounds
from torch_overlay.distributed.tensor._planner.regions import NotPlanned, Regions


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


instantiate_parametrized_tests(TestRegions)


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


class TestParts(TestCase):
    def test_parts_make_up_a_piece(self) -> None:
        for length, rounds in (((8, 3), 4), ((2, 9), 4), ((3, 1), 8), ((0, 5), 2)):
            places = [
                place
                for box in cut_into_rounds(length, rounds)
                for place in itertools.product(*[range(at, at + n) for at, n in zip(box.start, box.length)])
            ]
            self.assertEqual(sorted(places), list(itertools.product(*map(range, length))))


class TestRuns(TestCase):
    def test_boxes_that_follow_one_another_are_one(self) -> None:
        """Only if a flat tensor has their elements as it would have those of the one box."""
        whole = torch.arange(12).reshape(2, 2, 3)
        spans = [[(at, n) for at in range(size) for n in range(1, size - at + 1)] for size in whole.shape]
        boxes = [Box(*zip(*some)) for some in itertools.product(*spans)]
        held = {tuple(whole[tuple(slice(a, a + n) for a, n in zip(*box))].flatten().tolist()): box for box in boxes}
        for (mine, one), (theirs, other) in itertools.product(held.items(), repeat=2):
            self.assertEqual(one.then(other), held.get(mine + theirs), msg=f"{one} and {other}")


class TestWhoHoldsABox(TestCase):
    def test_parts_cover_a_box_once(self) -> None:
        """In the order in which they lie, each with the coordinate that holds it, of those that take part."""
        cuts = [*itertools.product((None, 0, 1), repeat=2)]
        for shape, dims in itertools.product(((7, 3), (1, 5), (6, 4)), cuts):
            cut = Regions.of(dims, (None, None), shape, (2, 3))
            box = Box((shape[0] // 3, 1), (shape[0] - shape[0] // 3, shape[1] - 1))
            for ranges in ((range(2), range(3)), (range(1, 2), range(3)), (range(2), range(1, 3))):
                places = {cut_place(place, cut, ranges) for place in itertools.product(*ranges)}
                held = {place: cut.box(place).meet(box) for place in places}
                wanted = {place: part for place, part in held.items() if part.elements}
                parts = [(tuple(place), part) for place, part in cut.parts(box, ranges)]
                self.assertEqual(dict(parts), wanted, msg=f"{cut} {ranges}")
                self.assertEqual(len(parts), len(wanted))
                self.assertEqual([part.start for _, part in parts], sorted(part.start for _, part in parts))
        self.assertEqual(list(cut.parts(Box((0, 0), (0, 4)), ranges)), [])


def cut_place(place, regions: Regions, ranges):
    """The same coordinate, the first of its range on each axis that cuts nothing."""
    return tuple(at if axis in regions.sharded else ranges[axis].start for axis, at in enumerate(place))


if __name__ == "__main__":
    run_tests()
