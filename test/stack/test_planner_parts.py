# Owner(s): ["oncall: distributed"]
"""The parts of a piece, one for each round."""

import itertools

from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed.tensor._planner.rounds import parts


class TestParts(TestCase):
    def test_parts_make_up_a_piece(self) -> None:
        for length, rounds in (((8, 3), 4), ((2, 9), 4), ((3, 1), 8), ((0, 5), 2)):
            found = [
                place
                for box in parts(length, rounds)
                for place in itertools.product(*[range(at, at + n) for at, n in zip(box.start, box.length)])
            ]
            self.assertEqual(sorted(found), list(itertools.product(*map(range, length))))


if __name__ == "__main__":
    run_tests()
