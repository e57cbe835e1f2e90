# Owner(s): ["oncall: distributed"]
"""How much the busiest rank of an all-to-all sends, against a count of what each rank sends."""

import itertools

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from test_planner_unlike import exchange, sent
from torch_overlay.distributed.tensor._planner.busiest import most_sent


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


instantiate_parametrized_tests(TestBusiest)
if __name__ == "__main__":
    run_tests()
