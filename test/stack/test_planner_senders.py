# Owner(s): ["oncall: distributed"]
"""Which of several replicas sends in an all-to-all."""

import itertools

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.senders import Exchange


def exchange(old, new, length: int, sizes) -> Exchange:
    """Of a tensor of one dim; ``old`` and ``new`` have 0 for each mesh dim that shards it."""
    nothing = (None,) * len(sizes)
    before, after = (Regions.of(dims, nothing, (length,), sizes) for dims in (old, new))
    return Exchange(before, after, tuple(range(len(sizes))))


class TestSenders(TestCase):
    """A replica becomes a shard and a shard a replica: only ranks (i, i) hold what others want of their nearest."""

    @parametrize("size", [2, 3, 4, 8])
    def test_each_rank_sends_to_one(self, size) -> None:
        asked = exchange((None, 0), (0, None), size * size, (size, size))
        senders = []
        for i, j in itertools.product(range(size), repeat=2):
            sender = [i, i]  # holds what rank (i, j) wants, and is its nearest sender
            for diagonal in asked.diagonals():
                diagonal.follow(sender, (i, j))
            self.assertEqual(sender[1], i, msg="another replica of the same shard")
            self.assertTrue(i != j or sender == [i, j], msg="what a rank holds isn't sent")
            senders.append(sender)
        self.assertEqual(sorted(senders), [[i, j] for i in range(size) for j in range(size)])

    def test_without_replicas_there_is_nothing_to_choose(self) -> None:
        self.assertEqual(exchange((0, 0), (None, 0), 16, (2, 2)).diagonals(), ())


instantiate_parametrized_tests(TestSenders)

if __name__ == "__main__":
    run_tests()
