# Owner(s): ["oncall: distributed"]
"""How much the busiest rank of an all-to-all sends, against a count of what each rank sends."""

import itertools
import math

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.busiest import most_sent
from torch_overlay.distributed.tensor._planner.regions import Regions, overlaps
from torch_overlay.distributed.tensor._planner.senders import Exchange


def exchange(old, new, length: int, sizes) -> Exchange:
    """Of a tensor of one dim; ``old`` and ``new`` have 0 for each mesh dim that shards it."""
    nothing = (None,) * len(sizes)
    before, after = (Regions.of(dims, nothing, (length,), sizes) for dims in (old, new))
    return Exchange(before, after, tuple(range(len(sizes))))


def sent(asked: Exchange, diagonals) -> int:
    """What the busiest rank sends, by looking at each: to whom it is the nearest, or on a diagonal, for each shard."""
    sizes, most = asked.before.sizes, {}
    for wanting in itertools.product(*map(range, sizes)):
        others = [range(size) if axis in asked.shards else (wanting[axis],) for axis, size in enumerate(sizes)]
        for sender in map(list, itertools.product(*others)):
            for diagonal in diagonals:
                diagonal.follow(sender, wanting)
            held, wanted = asked.before.box(sender), asked.after.box(wanting)
            ends = zip(held.start, held.length, wanted.start, wanted.length)
            common = [max(0, min(a + m, b + n) - max(a, b)) for a, m, b, n in ends]
            most[tuple(sender)] = most.get(tuple(sender), 0) + math.prod(common) * (tuple(sender) != wanting)
    return max(most.values())


class TestBusiest(TestCase):
    @parametrize("size", [2, 3, 4, 8])
    def test_on_diagonals_each_rank_sends_one_shard(self, size) -> None:
        asked = exchange((None, 0), (0, None), size * size, (size, size))
        self.assertGreaterEqual(most_sent(asked, (), 0), (size - 1) * size)
        self.assertEqual(most_sent(asked, asked.diagonals(), 0), size)

    @parametrize("length", [1, 5, 6, 7, 12])
    def test_no_rank_sends_more(self, length) -> None:
        for old, new in itertools.product(itertools.product((None, 0), repeat=2), repeat=2):
            asked = exchange(old, new, length, (2, 3))
            for diagonals in ((), asked.diagonals()):
                said = most_sent(asked, diagonals, 0)
                self.assertGreaterEqual(said, sent(asked, diagonals), msg=f"{old} to {new}")

    def test_on_diagonals_of_even_cuts_it_is_exact(self) -> None:
        for ends in (((None, 0), (0, None)), ((0, None), (None, 0))):
            asked = exchange(*ends, 36, (6, 6))
            diagonals = asked.diagonals()
            self.assertEqual(most_sent(asked, diagonals, 0), sent(asked, diagonals), msg=f"{ends}")

    @parametrize("old, new, kept", [((0, None), (None, None), 6), ((0, 0), (0, None), 2), ((0, 0), (None, None), 2)])
    def test_what_every_rank_keeps_is_not_sent(self, old, new, kept) -> None:
        asked = exchange(old, new, 12, (2, 3))
        self.assertEqual(most_sent(asked, (), kept), sent(asked, ()))

    def test_overlaps_cover_a_dim_once(self) -> None:
        cuts = [*itertools.product((None, 0), repeat=2)]
        for length, old, new in itertools.product(range(8), cuts, cuts):
            before, after = (Regions.of(dims, (None, None), (length,), (2, 3)) for dims in (old, new))
            seen = []
            for elements, held, wanted in overlaps(before, after, 0):
                spans = [range(start, start + n) for start, n in (before.span(0, held), after.span(0, wanted))]
                common = [place for place in spans[0] if place in spans[1]]
                self.assertEqual(len(common), elements, msg=f"{old} to {new}: {held} to {wanted}")
                seen += common
            self.assertEqual(seen, [*range(length)], msg=f"{old} to {new}")


instantiate_parametrized_tests(TestBusiest)
if __name__ == "__main__":
    run_tests()
