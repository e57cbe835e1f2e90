# Owner(s): ["oncall: distributed"]
"""Mesh dims of different sizes are paired by the digits of their coordinates."""

import itertools
from collections import Counter

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.senders import Digit, Exchange, primes


def exchange(length: int, sizes) -> Exchange:
    """From R, S(0) to S(0), R, of a tensor of one dim."""
    before, after = (Regions.of(dims, (None, None), (length,), sizes) for dims in ((None, 0), (0, None)))
    return Exchange(before, after, (0, 1))


class TestDigits(TestCase):
    @parametrize("sizes", [(2, 4), (4, 2), (6, 2), (6, 6), (12, 12)])
    def test_of_even_cuts_no_rank_sends_more_than_one_receives(self, sizes) -> None:
        length = sizes[0] * sizes[1]
        asked, sent = exchange(length, sizes), Counter()
        for wanting in itertools.product(*map(range, sizes)):
            start, wanted = asked.after.span(0, wanting)
            for shard in range(sizes[1]):
                sender = [wanting[0], shard]
                for diagonal in asked.diagonals():
                    diagonal.follow(sender, wanting)
                self.assertEqual(sender[1], shard, msg="another replica of the same shard")
                self.assertTrue(shard != wanting[1] or sender == [*wanting], msg="a rank is its own sender")
                first, held = asked.before.span(0, sender)
                if tuple(sender) != wanting:
                    sent[tuple(sender)] += max(0, min(start + wanted, first + held) - max(start, first))
        self.assertLessEqual(max(sent.values()), wanted)

    def test_each_digit_has_a_partner_of_its_base_if_there_is_one(self) -> None:
        asked = exchange(24, (4, 6))
        self.assertEqual([(d.replica.base, d.shard.base) for d in asked.diagonals()], [(2, 2), (2, 3)])

    def test_digits_make_up_the_coordinate(self) -> None:
        asked = exchange(24, (12, 2))
        digits = asked.cuts((0,))
        self.assertEqual(digits, [Digit(0, 6, 2), Digit(0, 3, 2), Digit(0, 1, 3)])
        for at in range(12):
            self.assertEqual(sum(digit.of((at, 0)) * digit.unit for digit in digits), at)

    def test_primes(self) -> None:
        self.assertEqual([primes(number) for number in (1, 2, 12, 49, 97)], [[], [2], [2, 2, 3], [7, 7], [97]])


instantiate_parametrized_tests(TestDigits)

if __name__ == "__main__":
    run_tests()
