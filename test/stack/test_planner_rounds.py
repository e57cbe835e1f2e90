# Owner(s): ["oncall: distributed"]
"""A large exchange over several mesh dims moves each element in one round, and holds little in each."""

import itertools

from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed.tensor._planner.cost import Cost, arriving, leaving
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.moves import move
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.rounds import in_rounds, parts
from torch_overlay.distributed.tensor._planner.steps import AllToAll

SIZES = (2, 2, 2)


class TestRounds(TestCase):
    def test_parts_make_up_a_piece(self) -> None:
        for length, rounds in (((8, 3), 4), ((2, 9), 4), ((3, 1), 8), ((0, 5), 2)):
            found = [
                place
                for box in parts(length, rounds)
                for place in itertools.product(*[range(at, at + n) for at, n in zip(box.start, box.length)])
            ]
            self.assertEqual(sorted(found), list(itertools.product(*map(range, length))))

    def test_no_round_holds_more_than_a_rank_has(self) -> None:
        several = 0
        for source, target in itertools.product(itertools.product((None, 0, 1), repeat=3), repeat=2):
            ends = [Regions.of(dims, (None,) * 3, (1 << 14, 1 << 12), SIZES) for dims in (source, target)]
            for step in in_rounds(move(*ends, Groups.of(None, SIZES), 4, Cost()), 4, Cost()):
                if isinstance(step, AllToAll) and len(step.axes) > 1:
                    staged = arriving(step) + leaving(step)
                    self.assertLessEqual(staged, step.rounds * step.before.most)
                    several += step.rounds > 1
        self.assertGreater(several, 100)

    def test_a_small_tensor_takes_one(self) -> None:
        ends = [Regions.of(dims, (None,) * 3, (1 << 10, 1 << 10), SIZES) for dims in ((0, 0, 0), (None, None, 1))]
        steps = move(*ends, Groups.of(None, SIZES), 4, Cost())
        self.assertEqual(in_rounds(steps, 4, Cost()), steps)


if __name__ == "__main__":
    run_tests()
