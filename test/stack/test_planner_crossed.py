# Owner(s): ["oncall: distributed"]
"""The mesh dims along which a move has to talk, against a look at each element."""

import itertools

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.moves import crossed
from torch_overlay.distributed.tensor._planner.regions import Regions


def differing(before, after) -> set[int]:
    """The mesh dims on which a rank and the nearest holder of an element that it wants differ, of a tensor of one dim.
    The nearest holder has the rank's own coordinate on each mesh dim that doesn't cut the source."""
    found: set[int] = set()
    for wanting in itertools.product(*map(range, before.sizes)):
        start, length = after.span(0, wanting)
        for element in range(start, start + length):
            others = [range(n) if a in before.sharded else (wanting[a],) for a, n in enumerate(before.sizes)]
            (holder,) = [
                place
                for place in itertools.product(*others)
                if 0 <= element - before.span(0, place)[0] < before.span(0, place)[1]
            ]
            found.update(a for a in before.sharded if holder[a] != wanting[a])
    return found


class TestCrossed(TestCase):
    @parametrize("sizes", [(2, 2), (2, 3), (2, 2, 2)])
    @parametrize("length", [1, 5, 7, 12])
    def test_ranks_and_holders_differ_along_these(self, sizes, length) -> None:
        cuts = [*itertools.product((None, 0), repeat=len(sizes))]
        for old, new in itertools.product(cuts, cuts):
            before, after = (Regions.of(dims, (None,) * len(sizes), (length,), sizes) for dims in (old, new))
            self.assertEqual(crossed(before, after), differing(before, after), msg=f"{old} to {new}")

    def test_ranks_that_want_nothing_may_count(self) -> None:
        """One element on two ranks: rank 1 wants nothing, and would have to cross if it did."""
        ends = [Regions.of((dim,), (None,), (1, 1), (2,)) for dim in (0, 1)]
        self.assertEqual(crossed(*ends), {0})
        self.assertEqual(crossed(*[Regions.of((dim,), (None,), (0, 1), (2,)) for dim in (0, 1)]), set())


instantiate_parametrized_tests(TestCrossed)

if __name__ == "__main__":
    run_tests()
