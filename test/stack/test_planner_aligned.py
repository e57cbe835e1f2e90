# Owner(s): ["oncall: distributed"]
"""Where cuts are aligned, digits say what the busiest rank sends, as the overlaps of chunks do."""

import random
from unittest import mock

from torch.testing._internal.common_utils import TestCase, run_tests

from test_planner_unlike import sent
from torch_overlay.distributed.tensor._planner import busiest
from torch_overlay.distributed.tensor._planner.busiest import _aligned, most_sent
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
    def test_digits_say_what_overlaps_say(self) -> None:
        rng, aligned = random.Random(1), 0
        for _ in range(100):
            asked = drawn(rng)
            for diagonals in ((), asked.diagonals()):
                kept = asked.before.most  # as much as a rank can keep, whatever else is found of that
                said = most_sent(asked, diagonals, kept)
                with mock.patch.object(busiest, "_aligned", return_value=False):
                    self.assertEqual(said, most_sent(asked, diagonals, kept), msg=f"{asked}, {diagonals}")
                self.assertGreaterEqual(most_sent(asked, diagonals, 0), sent(asked, diagonals), msg=f"{asked}")
                if _aligned(asked, 0):
                    aligned += 1
                    with mock.patch.object(busiest, "overlaps", side_effect=AssertionError):
                        most_sent(asked, diagonals, 0)  # looks at no chunks
        self.assertGreater(aligned, 50)


if __name__ == "__main__":
    run_tests()
