# Owner(s): ["oncall: distributed"]
"""A large exchange over several mesh dims takes rounds, so that it holds little in each."""

from torch.testing._internal.common_utils import TestCase, run_tests

from planner_simulator import SIZES, pairs, regions
from torch_overlay.distributed.tensor._planner.cost import Cost, arriving, leaving
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.moves import move
from torch_overlay.distributed.tensor._planner.rounds import in_rounds
from torch_overlay.distributed.tensor._planner.steps import AllToAll, Narrow, ReduceScatter


class TestRounds(TestCase):
    def test_no_round_holds_more_than_a_rank_has(self) -> None:
        several = 0
        for source, target in pairs():
            ends = [regions(spec, (1 << 14, 1 << 12)) for spec in (source, target)]
            for step in in_rounds(move(*ends, Groups.of(None, SIZES), 4, Cost()), 4, Cost()):
                if isinstance(step, AllToAll) and len(step.axes) > 1:
                    staged = arriving(step) + leaving(step)
                    self.assertLessEqual(staged, step.rounds * step.before.most)
                    several += step.rounds > 1
        self.assertGreater(several, 100)

    def test_a_small_tensor_takes_one(self) -> None:
        ends = [regions(spec, (1 << 10, 1 << 10)) for spec in ((0, 0, 0), (None, None, 1))]
        steps = move(*ends, Groups.of(None, SIZES), 4, Cost())
        self.assertEqual(in_rounds(steps, 4, Cost()), steps)

    def test_a_round_has_more_than_half_of_the_least(self) -> None:
        for rows, rounds in ((14 << 10, 4), (23 << 10, 8)):
            ends = [regions(spec, (rows, 1 << 10)) for spec in ((0, 0, 0), (None, None, 1))]
            (step,) = in_rounds(move(*ends, Groups.of(None, SIZES), 4, Cost()), 4, Cost())
            self.assertEqual(step.rounds, rounds)
            self.assertGreater(4 * (arriving(step) + leaving(step)) / rounds, Cost().round_bytes / 2)

    def test_what_a_reduce_scatter_packs_is_packed_in_rounds(self) -> None:
        """Where it cuts another tensor dim than the first, or begins with a view; and evenly."""
        for source, target, columns, rounds in (
            (("sum", "sum", None), (0, 1, None), 1 << 12, 4),
            (("sum", "sum", None), (0, 0, None), 1 << 12, 1),
            (("sum", "sum", None), (1, 1, None), 1 << 12, 4),
            (("sum", "sum", 1), (0, 0, 1), 1 << 12, 2),
            (("sum", "sum", None), (0, 1, None), (1 << 12) + 1, 1),
        ):
            whole, before, after = (
                regions(spec, (1 << 12, columns)) for spec in (("sum", "sum", None), source, target)
            )
            narrow = () if whole == before else (Narrow(whole, before),)
            steps = in_rounds((*narrow, ReduceScatter(before, after, (0, 1), "sum")), 4, Cost())
            self.assertEqual(steps[-1].rounds, rounds, msg=f"{target} of {columns}")


if __name__ == "__main__":
    run_tests()
