# Owner(s): ["oncall: distributed"]
"""What a rank keeps as its own nearest sender isn't sent: of aligned cuts the answer is that of a count."""

import random

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from test_planner_aligned import drawn
from test_planner_unlike import sent
from torch_overlay.distributed.tensor._planner.busiest import _aligned, most_sent
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.senders import Exchange


class TestNearest(TestCase):
    def test_digits_say_what_a_count_says(self) -> None:
        rng, aligned = random.Random(1), 0
        for _ in range(100):
            asked = drawn(rng)
            for diagonals in ((), asked.diagonals()):
                said, counted = most_sent(asked, diagonals, 0), sent(asked, diagonals)
                if _aligned(asked, 0):
                    aligned += 1
                    self.assertEqual(said, counted, msg=f"{asked}, {diagonals}")
                self.assertGreaterEqual(said, counted, msg=f"{asked}, {diagonals}")
        self.assertGreater(aligned, 50)

    @parametrize("new, most", [((0, 0), 5), ((0, None), 30)])
    def test_the_nearest_sender_keeps_what_it_wants_itself(self, new, most) -> None:
        asked = Exchange(*(Regions.of(dims, (None,) * 2, (36,), (6, 6)) for dims in ((None, 0), new)), (1,))
        self.assertEqual(most_sent(asked, (), 0), most)


instantiate_parametrized_tests(TestNearest)
if __name__ == "__main__":
    run_tests()
