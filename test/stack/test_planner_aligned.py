# Owner(s): ["oncall: distributed"]
"""Where cuts are even and of the same primes, digits say what the busiest rank sends, as a count by chunks does."""

import random

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.busiest import _aligned, _by_digits, _by_overlaps, most_sent
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.senders import Exchange


def drawn(rng: random.Random) -> Exchange:
    """Between two orders of cuts of a tensor of one dim."""
    sizes = tuple(rng.choices((2, 3, 4, 6), k=rng.choice((2, 3))))
    cuts = [tuple(rng.sample(range(len(sizes)), rng.randrange(len(sizes) + 1))) for _ in range(2)]
    length = rng.choice((12, 36, 48, 144))
    before, after = (Regions((length,), sizes, (cut,), (None,) * len(sizes)) for cut in cuts)
    return Exchange(before, after, tuple(range(len(sizes))))


class TestAligned(TestCase):
    def test_digits_say_what_a_count_of_chunks_says(self) -> None:
        rng, aligned = random.Random(1), 0
        for _ in range(400):
            asked = drawn(rng)
            cuts = asked.cuts(asked.after.orders[0])
            for diagonals in ((), asked.diagonals()):
                paired, used = ({pair[side] for pair in diagonals} for side in (0, 1))
                same = [digit for digit in cuts if digit.axis not in asked.shards and digit not in paired]
                summed = [digit for digit in cuts if digit not in same and digit not in used]
                counted = _by_overlaps(asked, 0, same, summed)
                if _aligned(asked, 0):
                    aligned += 1
                    self.assertEqual(_by_digits(asked, 0, summed), counted, msg=f"{asked}, {diagonals}")
                if summed == cuts:
                    self.assertEqual(asked.before.longest(0), counted, msg=f"{asked}, {diagonals}")
        self.assertGreater(aligned, 200)

    @parametrize("new, sent", [((0, 0), 5), ((0, None), 30)])
    def test_the_nearest_sender_keeps_what_it_wants_itself(self, new, sent) -> None:
        asked = Exchange(*(Regions.of(dims, (None,) * 2, (36,), (6, 6)) for dims in ((None, 0), new)), (1,))
        self.assertEqual(most_sent(asked, (), 0), sent)


instantiate_parametrized_tests(TestAligned)
if __name__ == "__main__":
    run_tests()
