# Owner(s): ["oncall: distributed"]
"""What collectives say of the pieces that ranks send and put in place."""

import itertools

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllReduce, Divide, ReduceScatter, Step


def regions(dims, shape) -> Regions:
    """On a (2, 2) mesh."""
    return Regions.of(dims, (None, None), shape, (2, 2))


def cells(box) -> list[tuple[int, ...]]:
    """The elements of a box, by their indices."""
    return [*itertools.product(*(range(start, start + n) for start, n in zip(*box, strict=True)))]


class TestCollectives(TestCase):
    def test_what_an_all_reduce_brings(self) -> None:
        whole = regions((None, None), (5, 2))
        self.assertEqual(AllReduce(whole, whole, (0,), "sum").received, 10)
        self.assertEqual(AllReduce(whole, whole, (0, 1), "sum").received, 15)

    def test_steps_are_values(self) -> None:
        steps: list[Step] = [Divide(2), AllReduce(*[regions((None, 0), (5, 2))] * 2, (0,), "sum")]
        again: list[Step] = [Divide(2), AllReduce(*[regions((None, 0), (5, 2))] * 2, (0,), "sum")]
        self.assertEqual([*map(hash, steps)], [*map(hash, again)])
        self.assertEqual(steps, again)

    @parametrize("length", [4, 5, 1])
    def test_a_gather_puts_every_piece_in_its_place(self, length) -> None:
        step = AllGather(regions((0, 0), (length, 2)), regions((None, None), (length, 2)), (0, 1))
        there = [cell for piece in step.pieces((1, 0)) for cell in cells(piece.box)]
        self.assertEqual(there, [*itertools.product(range(length), range(2))])

    def test_what_a_scatter_gives_away_is_what_others_keep(self) -> None:
        step = ReduceScatter(regions((None, None), (5, 2)), regions((0, 0), (5, 2)), (0, 1), "sum")
        self.assertEqual([piece.member for piece in step.pieces((0, 1))], [0, 1, 2, 3])
        for piece in step.pieces((0, 1)):
            member = step.members((0, 1))[piece.member]
            self.assertEqual(cells(piece.box), cells(step.after.box(member)))

    def test_a_box_counts_from_the_start_of_the_local_tensor(self) -> None:
        """Of rows 3 and 4, since mesh dim 0, which isn't in the group, cuts both ends."""
        outer, inner = regions((0, None), (5, 2)), regions((0, 0), (5, 2))
        pieces = [(0, ((0, 0), (1, 2))), (1, ((1, 0), (1, 2)))]
        for step in (AllGather(inner, outer, (1,)), ReduceScatter(outer, inner, (1,), "sum")):
            self.assertEqual([(piece.member, piece.box) for piece in step.pieces((1, 0))], pieces)


instantiate_parametrized_tests(TestCollectives)

if __name__ == "__main__":
    run_tests()
