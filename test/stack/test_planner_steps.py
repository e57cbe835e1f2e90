# Owner(s): ["oncall: distributed"]
"""What ranks send in a step is what others receive, and nothing is missing after it."""

import itertools

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllToAll, ReduceScatter

PLACED = (None, 0, 1)


def regions(dims, shape, sizes) -> Regions:
    return Regions.of(dims, (None,) * len(sizes), shape, sizes)


def cells(box, held=None) -> list[tuple[int, ...]]:
    """The elements of a box, by their indices; of a box inside ``held``, which counts from its start."""
    origin = held.start if held is not None else (0,) * len(box.start)
    ranges = [range(o + s, o + s + n) for o, s, n in zip(origin, box.start, box.length, strict=True)]
    return [*itertools.product(*ranges)]


class TestSteps(TestCase):
    """Steps over all mesh dims, as values."""

    @parametrize("sizes", [(2, 2), (2, 3)])
    @parametrize("shape", [(4, 6), (5, 3), (1, 2)])
    def test_an_all_to_all_brings_each_element_once(self, sizes, shape) -> None:
        places = [*itertools.product(*map(range, sizes))]
        for old, new in itertools.product(itertools.product(PLACED, repeat=2), repeat=2):
            before, after = regions(old, shape, sizes), regions(new, shape, sizes)
            step = AllToAll(before, after, (0, 1))
            for place in places:
                own, wanted = step.members(place).index(place), after.box(place)
                came = []
                for piece in step.receives(place):
                    sender = step.members(place)[piece.member]
                    (sent,) = [one for one in step.sends(sender) if step.members(sender)[one.member] == place]
                    got = cells(piece.box, wanted)
                    self.assertEqual(
                        got, cells(sent.box, before.box(sender)), msg=f"{old} to {new}, {sender} to {place}"
                    )
                    came += got
                self.assertEqual(sorted(came), cells(wanted), msg=f"{old} to {new} at {place}")
                received = [p.box.elements for p in step.receives(place) if p.member != own]
                self.assertEqual(step.received(place), sum(received))

    @parametrize("length", [4, 5, 1])
    def test_a_gather_puts_every_piece_in_its_place(self, length) -> None:
        step = AllGather(regions((0, 0), (length, 2), (2, 2)), regions((None, None), (length, 2), (2, 2)), (0, 1))
        there = [cell for piece in step.pieces((1, 0)) for cell in cells(piece.box)]
        self.assertEqual(there, [*itertools.product(range(length), range(2))])

    def test_what_a_scatter_gives_away_is_what_others_keep(self) -> None:
        step = ReduceScatter(regions((None, None), (5, 2), (2, 2)), regions((0, 0), (5, 2), (2, 2)), (0, 1), "sum")
        for piece in step.pieces((0, 1)):
            member = step.members((0, 1))[piece.member]
            self.assertEqual(cells(piece.box), cells(step.after.box(member)))


instantiate_parametrized_tests(TestSteps)

if __name__ == "__main__":
    run_tests()
