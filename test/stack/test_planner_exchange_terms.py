# Owner(s): ["oncall: distributed"]
"""An all-to-all brings the terms of a reduction, which each rank reduces in one order."""

import itertools

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from planner_simulator import MOVED, is_right, pairs, regions
from torch_overlay.distributed.tensor._planner.senders import Exchange
from torch_overlay.distributed.tensor._planner.steps import AllToAll


class TestExchangeTerms(TestCase):
    @parametrize("sizes", [(2, 2), (2, 3)])
    @parametrize("op", ["sum", "max"])
    def test_an_all_to_all_reduces_what_it_brings(self, sizes, op) -> None:
        for source, target in pairs((*MOVED, op), MOVED, 2):
            before, after = regions(source, (4, 5), sizes), regions(target, (4, 5), sizes)
            reduced = tuple(sorted(before.pending))
            for diagonals in ((), Exchange(before, after, (0, 1), reduced).diagonals()):
                step = AllToAll(before, after, (0, 1), op, reduced, diagonals)
                self.assertTrue(is_right([step], before, after), msg=f"{source} to {target}: {diagonals}")

    def test_terms_come_in_one_order_on_all_ranks(self) -> None:
        """A replica dim and the pending one make a diagonal, so that ranks in the order of `members` would reduce in
        different orders."""
        ends = regions((None, "sum", 0), (16, 4)), regions((0, None, None), (16, 4))
        step = AllToAll(*ends, (0, 1, 2), "sum", (1,), Exchange(*ends, (0, 1, 2), (1,)).diagonals())
        for place in itertools.product(range(2), repeat=3):
            terms = [step.members(place)[piece.member][1] for piece in step.receives(place)]
            self.assertEqual(terms, [0, 1], msg=f"{place}")


instantiate_parametrized_tests(TestExchangeTerms)

if __name__ == "__main__":
    run_tests()
