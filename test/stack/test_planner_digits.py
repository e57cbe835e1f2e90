# Owner(s): ["oncall: distributed"]
"""Mesh dims of different sizes are paired by the digits of their coordinates."""

import itertools
from collections import Counter

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from test_planner_senders import exchange
from torch_overlay.distributed.tensor._planner.senders import Digit, Exchange, primes


class TestDigits(TestCase):
    def check(self, asked: Exchange) -> None:
        """On diagonals, each rank has one sender for each shard, and no rank sends more than one receives."""
        sizes, sent = asked.before.sizes, Counter()
        for wanting in itertools.product(*map(range, sizes)):
            start, wanted = asked.after.span(0, wanting)
            shards = [range(size) if axis in asked.shards else (wanting[axis],) for axis, size in enumerate(sizes)]
            for nearest in itertools.product(*shards):
                sender = [*nearest]
                for diagonal in asked.diagonals():
                    diagonal.follow(sender, wanting)
                self.assertTrue(all(sender[axis] == nearest[axis] for axis in asked.shards), msg="another replica")
                self.assertTrue(nearest != wanting or sender == [*wanting], msg="a rank is its own sender")
                first, held = asked.before.span(0, sender)
                if tuple(sender) != wanting:
                    sent[tuple(sender)] += max(0, min(start + wanted, first + held) - max(start, first))
        self.assertLessEqual(max(sent.values(), default=0), asked.after.most, msg=f"{asked}")

    @parametrize("sizes", [(2, 4), (4, 2), (6, 2), (6, 6), (12, 12)])
    def test_of_even_cuts_no_rank_sends_more_than_one_receives(self, sizes) -> None:
        self.check(exchange((None, 0), (0, None), sizes[0] * sizes[1], sizes))

    @parametrize("sizes", [(2, 2, 2), (2, 4)])
    def test_nor_does_one_between_any_two_cuts(self, sizes) -> None:
        for old, new in itertools.product(itertools.product((None, 0), repeat=len(sizes)), repeat=2):
            self.check(exchange(old, new, 16, sizes))

    def test_a_digit_is_paired_with_one_of_its_base(self) -> None:
        (first, *_) = exchange((None, 0), (0, None), 24, (4, 6)).diagonals()
        self.assertEqual(first, (Digit(0, 2, 2), Digit(1, 3, 2)))

    def test_digits_make_up_the_coordinate(self) -> None:
        asked = exchange((None, 0), (0, None), 24, (12, 2))
        digits = asked.cuts((0,))
        self.assertEqual(digits, [Digit(0, 6, 2), Digit(0, 3, 2), Digit(0, 1, 3)])
        for at in range(12):
            self.assertEqual(sum(digit.of((at, 0)) * digit.unit for digit in digits), at)

    def test_primes(self) -> None:
        self.assertEqual([primes(number) for number in (1, 2, 12, 49, 97)], [[], [2], [2, 2, 3], [7, 7], [97]])


instantiate_parametrized_tests(TestDigits)

if __name__ == "__main__":
    run_tests()
