# Owner(s): ["oncall: distributed"]
"""Digits of different bases are paired, if no digit of the same base is left."""

import itertools
import math

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.senders import Exchange


def exchange(old, new, length: int, sizes) -> Exchange:
    """Of a tensor of one dim; ``old`` and ``new`` have 0 for each mesh dim that shards it."""
    nothing = (None,) * len(sizes)
    before, after = (Regions.of(dims, nothing, (length,), sizes) for dims in (old, new))
    return Exchange(before, after, tuple(range(len(sizes))))


def sent(asked: Exchange, diagonals) -> int:
    """What the busiest rank sends to others, counted: each rank asks, for each shard, its nearest replica or the one on
    its diagonal."""
    sizes, most = asked.before.sizes, {}
    for wanting in itertools.product(*map(range, sizes)):
        others = [range(size) if axis in asked.shards else (wanting[axis],) for axis, size in enumerate(sizes)]
        for sender in map(list, itertools.product(*others)):
            for diagonal in diagonals:
                diagonal.follow(sender, wanting)
            held, wanted = asked.before.box(sender), asked.after.box(wanting)
            ends = zip(held.start, held.length, wanted.start, wanted.length)
            common = [max(0, min(a + m, b + n) - max(a, b)) for a, m, b, n in ends]
            most[tuple(sender)] = most.get(tuple(sender), 0) + math.prod(common) * (tuple(sender) != wanting)
    return max(most.values())


class TestUnlike(TestCase):
    def test_an_equal_base_comes_first(self) -> None:
        asked = exchange((None, 0), (0, None), 24, (4, 6))
        self.assertEqual([(d.replica.base, d.shard.base) for d in asked.diagonals()], [(2, 2), (2, 3)])

    @parametrize("sizes, alike, all_digits", [((2, 3), 24, 12), ((4, 6), 72, 48), ((3, 8), 126, 72), ((3, 9), 54, 54)])
    def test_more_replicas_send(self, sizes, alike, all_digits) -> None:
        asked = exchange((None, 0), (0, None), 6 * sizes[0] * sizes[1], sizes)
        diagonals = asked.diagonals()
        self.assertEqual(sent(asked, [d for d in diagonals if d.replica.base == d.shard.base]), alike)
        self.assertEqual(sent(asked, diagonals), all_digits)

    @parametrize("sizes", [(3, 2), (2, 3, 2)])
    def test_no_rank_ever_sends_more_for_it(self, sizes) -> None:
        cuts = [*itertools.product((None, 0), repeat=len(sizes))]
        for old, new, length in itertools.product(cuts, cuts, (1, 6, 7, 12, 25)):
            asked = exchange(old, new, length, sizes)
            diagonals = asked.diagonals()
            alike = [d for d in diagonals if d.replica.base == d.shard.base]
            self.assertLessEqual(sent(asked, diagonals), sent(asked, alike), msg=f"{old} to {new} of {length}")


instantiate_parametrized_tests(TestUnlike)
if __name__ == "__main__":
    run_tests()
